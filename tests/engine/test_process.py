"""The engine's loop behind its socket, in this process: what one request may break, and what is said at the end."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from plait.engine.channel import Channel
from plait.engine.engine import Engine
from plait.engine.params import SamplingParams
from plait.engine.process import EngineLoop, _read
from plait.engine.request import Request
from tests.engine.toy_model import ToyExecutor


class Rig:
    """A loop over an engine with the toy model; `run` lets it work through messages until it ends."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.engine = Engine(ToyExecutor(), max_model_len=60, max_num_seqs=4)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loop = EngineLoop([self.engine], Channel(theirs), self._inbox)
        self._theirs, self._channel = theirs, Channel(ours)

    def run(self, *messages: Any) -> tuple[int, list[Any]]:
        """(exit status, messages that came out)."""
        for message in messages:
            self._inbox.put(message)
        status = self._loop.run()
        self._theirs.shutdown(socket.SHUT_WR)
        received = []
        while True:
            try:
                received.append(self._channel.receive())
            except EOFError:
                return status, received


@pytest.fixture
def rig() -> Iterator[Rig]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Rig(ours, theirs)


def _add(request_id: str, **params: Any) -> Any:
    return "add", 0, Request(request_id, [1, 2, 3], SamplingParams(temperature=0, **params))


def test_a_request_that_cannot_be_added_gets_an_error_and_the_next_one_is_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = rig.engine.add_request

    def fails_for_bad(request: Request) -> None:
        if request.request_id == "bad":
            raise MemoryError("no room for it")
        add(request)

    monkeypatch.setattr(rig.engine, "add_request", fails_for_bad)
    # The engine ends by itself at the shutdown, which it sees after its first step.
    status, received = rig.run(_add("bad", n=2), _add("good", max_tokens=1), ("check", 1), ("shutdown",))
    assert status == 0
    rig.engine.abort("good")
    rig.engine.check_integrity()
    assert [message[0] for message in received] == ["checked"]


def test_the_error_of_an_add_reaches_every_choice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request) -> None:
        raise TypeError("unheard-of")

    monkeypatch.setattr(rig.engine, "add_request", fail)
    touched: dict[int, list[Any]] = {}
    rig._loop._handle(_add("bad", n=2), touched)
    assert [(o.request_id, o.index, o.finish_reason, o.error) for o in touched[0]] == [
        ("bad", i, "error", "TypeError: unheard-of") for i in range(2)
    ]


def test_a_loop_that_cannot_go_on_says_so_and_ends_with_a_status(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("schedule")

    monkeypatch.setattr(rig.engine.scheduler, "schedule", fail)
    status, received = rig.run(_add("a"))
    assert status == 1
    assert received == [("broken", "the engine failed: KeyError: 'schedule'")]


def test_a_check_that_stumbles_is_an_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(rig.engine, "check_integrity", fail)
    status, received = rig.run(("check", 7), ("shutdown",))
    assert status == 0
    ((kind, number, (health,)),) = received
    assert (kind, number, health.integrity) == ("checked", 7, "IndexError: out of range")


def test_whatever_arrives_interrupts_engines_that_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting: list[int] = []

    class Told:
        def interrupt(self) -> None:
            waiting.append(inbox.qsize())

    exits: list[int] = []
    monkeypatch.setattr("plait.engine.process.os._exit", exits.append)
    with theirs:
        Channel(ours).send(("abort", 0, "a"))
        Channel(ours).send(("check", 1))
        ours.shutdown(socket.SHUT_WR)
        _read(Channel(theirs), inbox, [Told(), Told()])
    ours.close()
    # The message is there before the engine is told: whoever returns then finds it.
    assert waiting == [1, 1, 2, 2] and len(exits) == 1
