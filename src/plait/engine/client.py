"""The serving process's side of the engine process: requests go in, text comes out. No torch."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from plait import errors
from plait.engine.channel import HEADER, ModelHealth, ModelInfo, encode
from plait.engine.outputs import ChoiceDelta, OutputProcessor, RequestOutput
from plait.engine.request import Request
from plait.errors import EngineError, PlaitError, RequestError

if TYPE_CHECKING:
    from plait.engine.process import EngineProcess
    from plait.engine.stats import EngineStats
    from plait.text.tokenizer import Tokenizer

log = logging.getLogger("plait.server")

_CHECK_TIMEOUT_S = 10.0


@dataclass(eq=False)
class Stream:
    """The text of some requests that belong together, as it comes. Iterate once; close in any case.

    results: by position, filled as the requests end.
    """

    client: EngineClient
    model: int
    request_ids: list[str]
    choices: int
    results: dict[int, RequestOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._positions = {request_id: i for i, request_id in enumerate(self.request_ids)}
        self._deltas: list[tuple[int, ChoiceDelta]] = []
        self._error: PlaitError | None = None
        self._wake = asyncio.Event()

    @property
    def finished(self) -> bool:
        return len(self.results) == len(self.request_ids)

    async def batches(self) -> AsyncIterator[list[tuple[int, ChoiceDelta]]]:
        """What has come since the last time, as (position of the request, delta). Raises PlaitError when the engine
        has died or refuses a request."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            deltas, self._deltas = self._deltas, []
            if deltas:
                yield deltas
            if self._error is not None:
                raise self._error
            if self.finished and not self._deltas:
                return

    def close(self) -> None:
        """Abort what has not ended; nothing happens after the end."""
        self.client._forget(self)

    def take(self, delta: ChoiceDelta) -> None:
        self._deltas.append((self._positions[delta.request_id], delta))
        self._wake.set()

    def end(self, result: RequestOutput) -> None:
        self.results[self._positions[result.request_id]] = result
        self._wake.set()

    def fail(self, error: PlaitError) -> None:
        self._error = error
        self._wake.set()


class EngineClient:
    """Speaks with one engine process. Everything happens on one event loop.

    on_death: called once when the engine has ended unasked, with the reason. on_terminated: the engine process got
    SIGTERM. stats: per model what the last step reported, None before the first.
    """

    def __init__(self, process: EngineProcess, tokenizers: Sequence[Tokenizer]) -> None:
        self._process = process
        self._processors = [OutputProcessor(tokenizer) for tokenizer in tokenizers]
        self._streams: list[dict[str, Stream]] = [{} for _ in tokenizers]
        self._checks: dict[int, asyncio.Future[list[ModelHealth]]] = {}
        self._numbers = count()
        self._closing = False
        self.stats: list[EngineStats | None] = [None] * len(tokenizers)
        self.death: str | None = None
        self.on_death: Callable[[str], None] = lambda reason: None
        self.on_terminated: Callable[[], None] = lambda: None

    async def start(self) -> list[ModelInfo]:
        """Wait until the models are loaded. Raises the PlaitError that the engine's start ended with."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._process.connection)
        try:
            message = await self._receive()
        except EOFError:
            raise EngineError(f"{await self._obituary()} while it was loading") from None
        if message[0] == "failed":
            kind = getattr(errors, message[1], EngineError)
            raise kind(message[2])
        self._task = asyncio.create_task(self._read())
        return message[1]

    def submit(self, model: int, requests: Sequence[tuple[Request, str | None]]) -> Stream:
        """Hand requests (with their prompts' texts) to the engine. Raises EngineError if it has died."""
        if self.death is not None:
            raise EngineError(self.death)
        ids = [request.request_id for request, _ in requests]
        stream = Stream(self, model, ids, sum(request.params.n for request, _ in requests))
        for request, prompt in requests:
            self._processors[model].add_request(request, prompt)
        for request, _ in requests:
            self._streams[model][request.request_id] = stream
            self._send(("add", model, request))
        return stream

    def num_choices(self, model: int) -> int:
        """Choices of unfinished requests, running or waiting."""
        return sum({id(s): s.choices for s in self._streams[model].values()}.values())

    async def check(self) -> list[ModelHealth]:
        """Per model the integrity of its blocks, checked where it is idle. Raises EngineError."""
        if self.death is not None:
            raise EngineError(self.death)
        number = next(self._numbers)
        future = self._checks[number] = asyncio.get_running_loop().create_future()
        self._send(("check", number))
        try:
            return await asyncio.wait_for(future, _CHECK_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {_CHECK_TIMEOUT_S:g} s") from None
        finally:
            self._checks.pop(number, None)

    def abort_all(self) -> None:
        """End every request; their streams finish with finish_reason "abort"."""
        for model, streams in enumerate(self._streams):
            for request_id in streams:
                self._send(("abort", model, request_id))

    async def close(self) -> None:
        """Tell the engine to end and wait until it is gone."""
        self._closing = True
        self._send(("shutdown",))
        await asyncio.get_running_loop().run_in_executor(None, self._process.wait, 5.0)
        self._writer.close()

    def _send(self, message: Any) -> None:
        if self.death is None:
            self._writer.write(encode(message))

    async def _receive(self) -> Any:
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EOFError from error

    async def _read(self) -> None:
        reason = None
        try:
            while True:
                message = await self._receive()
                if message[0] == "broken":
                    reason = message[1]
                    break
                self._dispatch(message)
        except EOFError:
            pass
        except Exception as error:
            # Nobody reads the engine's answers any longer: better an end than streams that wait for ever.
            log.exception("the engine's answers cannot be handled")
            reason = f"the engine's answers cannot be handled: {type(error).__name__}: {error}"
        if not self._closing:
            self._die(reason or await self._obituary())

    def _dispatch(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("step", steps):
                for model, outputs, stats in steps:
                    self.stats[model] = stats
                    self._deliver(model, outputs)
            case ("refused", model, request_id, text, field_name):
                stream = self._streams[model].get(request_id)
                if stream is not None:
                    stream.fail(RequestError(text, field=field_name))
            case ("checked", number, health):
                future = self._checks.get(number)
                if future is not None and not future.done():
                    future.set_result(health)
            case ("terminated",):
                self.on_terminated()

    def _deliver(self, model: int, outputs: list[Any]) -> None:
        step = self._processors[model].process(outputs)
        streams = self._streams[model]
        for request_id, choice in step.to_stop:
            self._send(("stop", model, request_id, choice))
        for delta in step.deltas:
            streams[delta.request_id].take(delta)
        for result in step.finished:
            streams.pop(result.request_id).end(result)

    def _forget(self, stream: Stream) -> None:
        for request_id in stream.request_ids:
            if self._streams[stream.model].pop(request_id, None) is not None:
                self._processors[stream.model].drop(request_id)
                self._send(("abort", stream.model, request_id))

    async def _obituary(self) -> str:
        return await asyncio.get_running_loop().run_in_executor(None, self._process.obituary)

    def _die(self, reason: str) -> None:
        self.death = reason
        self._writer.close()
        for streams in self._streams:
            for stream in set(streams.values()):
                stream.fail(EngineError(reason))
            streams.clear()
        for future in self._checks.values():
            if not future.done():
                future.set_exception(EngineError(reason))
        self.on_death(reason)
