"""The life of the server: engine process, HTTP, signals, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.engine.process import EngineProcess
from plait.errors import EngineError, UsageError
from plait.server.security import loopback_hosts
from plait.server.state import Settings

log = logging.getLogger("plait.server")

_NICENESS = 5
_BACKLOG = 2048
# After the engine's death: time for the errors to reach the clients and for /health to be seen red.
_LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A model to serve. names: its id and aliases. options: keyword arguments of build_engine, without the model."""

    path: Path
    names: tuple[str, ...]
    options: dict[str, Any]


def serve(specs: list[ModelSpec], host: str, port: int, settings: Settings, say: Callable[[str], None] = print) -> int:
    """Serve until told to stop; returns the exit status: 0 after SIGTERM or an interrupt, 1 when the engine died.

    Call it from the main thread. Raises PlaitError when the start fails.
    """
    start_s = time.monotonic()
    # Until the event loop has its own handlers: an orderly end, so that the engine's is seen to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if is_loopback(host) and not settings.keys:
        settings = replace(settings, hosts=loopback_hosts(host))
    listener = _listen(host, port)
    engine = EngineProcess([{"model": spec.path, **spec.options} for spec in specs])
    try:
        # The engine's step loop goes first where processors are few.
        os.nice(_NICENESS)
        from plait.text.tokenizer import load_tokenizer

        tokenizers = [load_tokenizer(spec.path) for spec in specs]
        server = _Server(specs, tokenizers, engine, settings, say)
        return asyncio.run(server.run(listener, start_s))
    finally:
        listener.close()
        engine.end()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port that is taken is known before anything is loaded."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Of two servers that start together both can bind; only one can listen.
        listener.listen(_BACKLOG)
    except (OSError, OverflowError, ValueError) as error:
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host} port {port}: {reason}; choose another --port or --host") from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on this address."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


class _Server:
    """uvicorn around the application, with our own rules for signals and endings."""

    def __init__(
        self,
        specs: list[ModelSpec],
        tokenizers: list[Any],
        engine: EngineProcess,
        settings: Settings,
        say: Callable[[str], None],
    ) -> None:
        from plait.engine.client import EngineClient
        from plait.server.metrics import Metrics
        from plait.server.state import ServerState

        self._specs, self._tokenizers, self._settings, self._say = specs, tokenizers, settings, say
        self._client = EngineClient(engine, tokenizers)
        self._client.on_death = self._on_death
        self._client.on_terminated = self._drain
        names = [spec.names[0] for spec in specs]
        self._state = ServerState(settings, self._client, Metrics(lambda: zip_stats(names, self._client.stats)))
        self._status = 0
        self._told_to_stop = False

    async def run(self, listener: socket.socket, start_s: float) -> int:
        import uvicorn

        from plait.server.app import create_app
        from plait.server.http import HeadTimeoutProtocol

        config = uvicorn.Config(
            create_app(self._state),
            loop="asyncio",
            http=HeadTimeoutProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=self._settings.max_connections,
            h11_max_incomplete_event_size=64 << 10,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, round(self._settings.shutdown_timeout_s) + 3),
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.capture_signals = _no_signals  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._serve_http(listener))
        loading = asyncio.create_task(self._load(listener, start_s))
        try:
            await asyncio.wait({http, loading}, return_when=asyncio.FIRST_COMPLETED)
            if http.done() and not loading.done():
                loading.cancel()
                await http
                # Told to stop while the models were being loaded.
                return self._status
            await loading
            await http
        except BaseException:
            self._uvicorn.should_exit = True
            await asyncio.wait({http})
            raise
        if self._client.death is None:
            await self._client.close()
        return self._status

    async def _serve_http(self, listener: socket.socket) -> None:
        """Until the server is told to end. Raises EngineError where it cannot start: uvicorn exits then."""
        try:
            await self._uvicorn.serve(sockets=[listener])
        except (SystemExit, OSError) as error:
            raise EngineError(f"the HTTP server failed: {type(error).__name__}: {error}") from error

    async def _load(self, listener: socket.socket, start_s: float) -> None:
        from plait.server.state import Served

        infos = await self._client.start()
        for index, (spec, tokenizer, info) in enumerate(zip(self._specs, self._tokenizers, infos, strict=True)):
            self._state.models.append(Served(list(spec.names), index, tokenizer, info))
            self._say(f"model {spec.names[0]}, weights in {info.precision}, context {info.max_model_len:,} tokens")
            for line in info.lines:
                self._say(f"  {line}")
        if self._state.phase == "loading":
            self._state.phase = "ready"
        address, port = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        if not is_loopback(address) and not self._settings.keys:
            self._say(f"warning: anybody who can reach {shown} can use this server: set --api-key, or --host 127.0.0.1")
        self._say(f"listening on http://{shown}:{port} (OpenAI API under /v1, chat page at /)")
        self._say(f"ready in {time.monotonic() - start_s:.1f} s")

    def _on_signal(self) -> None:
        if self._told_to_stop:  # asked twice: now
            self._client.abort_all()
            self._uvicorn.force_exit = True
        self._told_to_stop = True
        self._status = 0
        self._drain()

    def _drain(self) -> None:
        """Take nothing new, let running requests end until the deadline, then abort them."""
        if self._state.phase in ("draining", "dead"):
            return
        if not self._told_to_stop:
            log.error("the engine process was told to end")
            self._status = 1
        self._state.phase = "draining"
        self._uvicorn.should_exit = True
        asyncio.get_running_loop().call_later(self._settings.shutdown_timeout_s, self._client.abort_all)

    def _on_death(self, reason: str) -> None:
        log.error("%s", reason)
        self._state.phase = "dead"
        self._status = 1

        def leave() -> None:
            self._uvicorn.should_exit = True

        asyncio.get_running_loop().call_later(_LAST_WORDS_S, leave)


def zip_stats(names: list[str], stats: list[Any]) -> list[tuple[str, Any]]:
    return list(zip(names, stats, strict=True))


@contextmanager
def _no_signals() -> Iterator[None]:
    """In place of uvicorn's handlers, which end the process by the signal instead of with status 0."""
    yield
