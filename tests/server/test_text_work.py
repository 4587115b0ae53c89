"""Tokenising and rendering: within the deadline, for those who still wait, and without holding up other models."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from plait.server.app import opened
from plait.server.body import ClientGone
from plait.server.deadline import Deadline
from plait.server.errors import ApiError
from plait.server.state import Served, ServerState, Settings
from plait.text.tokenizer import load_tokenizer
from tests.server.running import running, wait_for
from tests.tiny import tiny_model_dir, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)


class _Work:
    """Text work that lasts until it is let go."""

    def __init__(self):
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.release.wait(30)
        return "done"


async def _stay():
    await asyncio.Event().wait()


async def _leave():
    return {"type": "http.disconnect"}


def _state():
    return ServerState(Settings(), client=None, metrics=None)  # type: ignore[arg-type]


def _served(tokenizer, index=0):
    return Served([f"model-{index}"], index, tokenizer, info=None)  # type: ignore[arg-type]


def test_the_deadline_counts_and_work_that_waits_is_not_begun(tokenizer):
    state, served, first, second = _state(), _served(tokenizer), _Work(), _Work()

    async def scenario():
        running_one = asyncio.create_task(state.text_work(served, first, _stay, Deadline(None)))
        await asyncio.to_thread(first.begun.wait)
        with pytest.raises(ApiError) as caught:
            await state.text_work(served, second, _stay, Deadline(0.05))
        assert (caught.value.status, caught.value.code) == (504, "timeout")
        with pytest.raises(ClientGone):
            await state.text_work(served, second, _leave, Deadline(None))
        first.release.set()
        assert await running_one == "done"
        assert await state.text_work(served, lambda: "next", _stay, Deadline(30)) == "next"

    asyncio.run(scenario())
    assert not second.begun.is_set()


def test_a_model_does_not_wait_for_another_ones_text(tokenizer):
    state, work = _state(), _Work()

    async def scenario():
        busy = asyncio.create_task(state.text_work(_served(tokenizer), work, _stay, Deadline(None)))
        await asyncio.to_thread(work.begun.wait)
        assert await state.text_work(_served(tokenizer, 1), lambda: "other", _stay, Deadline(30)) == "other"
        work.release.set()
        await busy

    asyncio.run(scenario())


def test_a_failure_of_the_work_is_the_requests_failure(tokenizer):
    def fail():
        raise KeyError("template")

    with pytest.raises(KeyError):
        asyncio.run(_state().text_work(_served(tokenizer), fail, _stay, Deadline(None)))


def test_the_time_that_is_left_shrinks_to_zero():
    deadline = Deadline(0.01)
    assert deadline.left_s() <= 0.01
    time.sleep(0.02)
    assert deadline.left_s() == 0.0 and Deadline(None).left_s() is None


def test_a_call_does_not_outlive_a_failure_to_prepare_its_answer():
    class Call:
        closed = 0

        def close(self):
            self.closed += 1

    call = Call()

    def fail(*_):
        raise RuntimeError("no text for these ids")

    with pytest.raises(RuntimeError):
        opened(call, fail, None)
    assert call.closed == 1


@pytest.fixture(scope="module")
def slow_template(tmp_path_factory):
    """A model whose template takes seconds for a message "slow", and a deadline of half a second."""
    directory = tiny_model_dir(tmp_path_factory.mktemp("slow"))
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    loop = "{% for i in range(3000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
    settings["chat_template"] = (
        "{% if messages[0]['content'] == 'slow' %}" + loop + "{% endif %}" + settings["chat_template"]
    )
    file.write_text(json.dumps(settings))
    with running(str(directory), "--request-timeout", "0.5") as server:
        yield server


def _chat(content):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_template_that_takes_too_long_is_a_timeout(slow_template, stream):
    answer = slow_template.post("/v1/chat/completions", {**_chat("slow"), "stream": stream})
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    assert slow_template.metric("prompt_tokens_total") == 0


@pytest.mark.slow
def test_a_client_that_leaves_while_its_prompt_is_made_is_not_submitted(slow_template):
    lines = len(slow_template.lines)
    with slow_template.rude_request("/v1/chat/completions", **_chat("slow")):
        pass
    wait_for(lambda: any("status=499" in line for line in slow_template.lines[lines:]), 20)
    assert slow_template.metric("prompt_tokens_total") == 0
