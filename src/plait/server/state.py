"""What the handlers share: the served models, the engine's client, the limits."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from plait.engine.words import WordResolver
from plait.server.body import ClientGone, Receive
from plait.server.deadline import Deadline, disconnected
from plait.server.errors import ApiError, bad_request, unknown_model

if TYPE_CHECKING:
    from plait.engine.channel import ModelInfo
    from plait.engine.client import EngineClient
    from plait.server.metrics import Metrics
    from plait.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What the command line decides. keys: empty for none. request_timeout_s: None for no deadline.

    hosts: names that a Host header may have, without port; empty for any.
    """

    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()
    max_queue: int = 1024
    max_body_bytes: int = 8 << 20
    max_connections: int = 1024
    request_timeout_s: float | None = None
    shutdown_timeout_s: float = 15.0
    log_json: bool = False


@dataclass
class Served:
    """One model. names: the first is its id, the others are accepted too. index: its place in the engine process.

    text_thread: the one thread that tokenises and renders for it.
    """

    names: list[str]
    index: int
    tokenizer: Tokenizer
    info: ModelInfo
    words: WordResolver = field(init=False)
    text_thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.words = WordResolver(self.tokenizer)
        # Tokenising a long prompt or rendering a template must hold up neither the streams nor other models.
        self.text_thread = ThreadPoolExecutor(1, thread_name_prefix="plait-text")

    @property
    def id(self) -> str:
        return self.names[0]

    @property
    def all_names(self) -> list[str]:
        """What a request may call it, with its adapters."""
        return [*self.names, *self.info.adapters]


class ServerState:
    """One per server. phase: "loading", "ready", "draining" or "dead"."""

    def __init__(self, settings: Settings, client: EngineClient, metrics: Metrics) -> None:
        self.settings = settings
        self.client = client
        self.metrics = metrics
        self.models: list[Served] = []
        self.phase = "loading"
        self.created = int(time.time())

    def check_accepting(self) -> None:
        """Raises ApiError 503 while no request can be taken."""
        reasons = {
            "loading": "the model is being loaded",
            "draining": "the server is shutting down",
            "dead": f"the engine has died: {self.client.death}",
        }
        if self.phase in reasons:
            raise ApiError(503, reasons[self.phase], code=self.phase, headers={"retry-after": "2"})

    def find_model(self, name: str | None) -> Served:
        """The model of this name, or of the adapter of this name. Raises ApiError 404 with the list of what is served,
        503 while loading."""
        self.check_accepting()
        if name is None:
            if len(self.models) == 1:
                return self.models[0]
            raise bad_request("model is missing: this server has several", "model", "missing_required_parameter")
        for model in self.models:
            if name in model.all_names:
                return model
        raise unknown_model(name, self.served_names())

    def served_names(self) -> list[str]:
        """The ids of models and adapters."""
        return [name for model in self.models for name in (model.id, *model.info.adapters)]

    def check_queue(self, model: Served, choices: int) -> None:
        """Raises ApiError 429 when so many more choices would overfill the queue, 400 when they always would."""
        room = model.info.max_num_seqs + self.settings.max_queue
        if choices > room:
            raise bad_request(f"the request asks for {choices} outputs, at most {room} are allowed (--max-queue)", "n")
        if self.client.num_choices(model.index) + choices > room:
            raise ApiError(
                429,
                f"the queue is full: {room} outputs are running or waiting; try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )

    async def text_work(self, served: Served, work: Callable[[], T], receive: Receive, deadline: Deadline) -> T:
        """Run what tokenises or renders in the model's text thread. Raises ApiError 504 when the deadline passes first,
        ClientGone when the client leaves first: nothing is left to be done with the result then.

        receive: of the request, whose body has been read.
        """
        job = served.text_thread.submit(work)
        task = asyncio.wrap_future(job)
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            waiting: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(waiting, timeout=deadline.left_s(), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone if gone.done() else deadline.error()
            result = task.result()
            if gone.done():
                raise ClientGone
            return result
        finally:
            # Work that waits for the thread is not begun any more; what runs there cannot be stopped.
            for future in (job, task, gone):
                future.cancel()


def new_id(prefix: str) -> str:
    """An identifier as OpenAI's API has them."""
    return f"{prefix}-{uuid.uuid4().hex}"
