"""One engine stepped by several calls at once: whoever steps, every call gets what belongs to its own requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from plait.engine.engine import Engine
from plait.engine.outputs import ChoiceDelta, OutputProcessor, RequestOutput
from plait.engine.request import Request
from plait.errors import EngineError

# Who steps again and again leaves the lock free this long for those who wait for it: locks are not handed over in turn.
_HAND_OVER_S = 100e-6


class Mail:
    """What steps have brought for the requests of one call and it has not taken yet. Any thread may post and take."""

    def __init__(self) -> None:
        self._deltas: deque[ChoiceDelta] = deque()
        self._finished: deque[RequestOutput] = deque()

    def post(self, deltas: Sequence[ChoiceDelta], finished: Sequence[RequestOutput]) -> None:
        """Add to both; a request's last deltas come no later than its result."""
        self._deltas.extend(deltas)
        self._finished.extend(finished)

    def take(self) -> tuple[list[ChoiceDelta], list[RequestOutput]]:
        """All deltas and results that have come. Results first, so that none comes without its last deltas."""
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        return [self._deltas.popleft() for _ in range(len(self._deltas))], finished


class SharedSteps:
    """Steps an engine for calls that overlap, in one thread (interleaved generators) or in several.

    The lock is held for one step or one change of the engine, never while a caller has the control.
    """

    def __init__(self, engine: Engine, processor: OutputProcessor) -> None:
        self._engine = engine
        self._processor = processor
        self._lock = threading.RLock()
        self._stepping = False
        self._owners: dict[str, Mail] = {}
        self._left: list[str] = []
        self._waiting: list[None] = []  # one for each thread that waits to change the engine

    @contextmanager
    def running(self, requests: Sequence[Request], texts: Sequence[str | None]) -> Iterator[Mail]:
        """All requests in the engine, or none; whatever is left at the end (an interrupt) is aborted.

        Yields the argument of `advance`.
        """
        mail = Mail()
        try:
            with self._changing():
                for request, text in zip(requests, texts, strict=True):
                    self._engine.add_request(request)
                    self._owners[request.request_id] = mail
                    self._processor.add_request(request, text)
            yield mail
        finally:
            self._leave([request.request_id for request in requests])

    def advance(self, mail: Mail) -> tuple[list[ChoiceDelta], list[RequestOutput]]:
        """What has come since the last time, deltas and results; makes one step if nothing has.

        Raises EngineError where nothing can come any more, because somebody else has ended the requests.
        """
        taken = mail.take()
        if any(taken):
            return taken
        if self._waiting:
            time.sleep(_HAND_OVER_S)
        with self._lock:
            taken = mail.take()
            if not any(taken):
                if not any(owner is mail and self._engine.has_request(i) for i, owner in self._owners.items()):
                    raise EngineError("the request is no longer in the engine: it was aborted elsewhere")
                self._step()
                taken = mail.take()
        return taken

    def refresh(self) -> None:
        """Engine.refresh(), between two steps."""
        with self._changing():
            self._engine.refresh()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock. Until it is had, the engine makes single steps for other callers."""
        if not self._lock.acquire(blocking=False):
            self._waiting.append(None)
            try:
                self._engine.interrupt()
                self._lock.acquire()
            finally:
                self._waiting.pop()
        try:
            yield
        finally:
            self._lock.release()

    def _step(self) -> None:
        self._stepping = True
        try:
            if self._waiting:
                self._engine.interrupt()
            step = self._processor.process(self._engine.step())
            for request_id, index in step.to_stop:
                self._engine.stop(request_id, index)
            for delta in step.deltas:
                if (mail := self._owners.get(delta.request_id)) is not None:
                    mail.post([delta], [])
            for result in step.finished:
                if (mail := self._owners.get(result.request_id)) is not None:
                    mail.post([], [result])
        finally:
            self._stepping = False
            self._drop_left()

    def _leave(self, request_ids: list[str]) -> None:
        with self._changing():
            self._left += request_ids
            # A forgotten generator may be collected in the middle of this very thread's step: not now then.
            if not self._stepping:
                self._drop_left()

    def _drop_left(self) -> None:
        while self._left:
            request_id = self._left.pop()
            # A request that the engine refused because its id is in use is somebody else's.
            if self._owners.pop(request_id, None) is not None:
                self._engine.abort(request_id)
                self._processor.drop(request_id)
