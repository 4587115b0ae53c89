"""The engine as a process of its own: how it is started, and what runs in it.

One message per step carries all outputs of all models. Neither process outlives the other: the engine's reader thread
sees the end of the socket wherever the engine is busy, and on Linux the kernel kills it with its parent; the serving
process sees the end of the socket too (plait.engine.client).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.engine.channel import Channel, ModelHealth, ModelInfo, encode
from plait.engine.request import Request
from plait.engine.token_output import TokenOutput
from plait.errors import EngineError, PlaitError, RequestError

if TYPE_CHECKING:
    from plait.engine.build import EngineBundle

_PR_SET_PDEATHSIG = 1
_LOST_PARENT = 3


class EngineProcess:
    """Starts the process; call it from the main thread (on Linux the child dies with the thread that started it).

    options: per model the keyword arguments of `plait.engine.build.build_engine`, with "model".
    connection: our end of the socket.
    """

    def __init__(self, options: list[dict[str, Any]]) -> None:
        self.connection, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        # The child finds the package where this process found it; -P keeps the working directory out of its path.
        code = (
            f"import sys; {root!r} in sys.path or sys.path.append({root!r}); "
            f"from plait.engine.process import main; sys.exit(main({theirs.fileno()}, {os.getpid()}))"
        )
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()])
        self.pid = self._process.pid
        with contextlib.suppress(OSError):  # it has ended already: whoever reads the connection finds out
            self.connection.sendall(encode(options))

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None if it still runs after the time-out."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout_s: float = 5.0) -> None:
        """Close the connection and make sure that the process is gone."""
        self.connection.close()
        if self.wait(timeout_s) is None:
            self._process.kill()
            self._process.wait()

    def obituary(self) -> str:
        """How the process ended, in words."""
        status = self.wait(2.0)
        if status is None:
            return "the engine process closed its connection"
        if status < 0:
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"the engine process was ended by {name}{hint}"
        return f"the engine process ended with status {status}"


def main(descriptor: int, parent: int) -> int:
    """What the child runs. descriptor: its end of the socket."""
    _die_with(parent)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A terminal's interrupt and a supervisor's SIGTERM reach both processes: the serving one decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(("terminate",)))
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        options = channel.receive()
    except EOFError:
        return _LOST_PARENT
    engines: list[Any] = []  # once there are any
    threading.Thread(target=_read, args=(channel, inbox, engines), daemon=True).start()
    try:
        bundles = _build(options)
    except PlaitError as error:
        channel.send(("failed", type(error).__name__, str(error)))
        return error.exit_status
    except Exception as error:
        channel.send(("failed", "EngineError", f"{type(error).__name__}: {error}"))
        return 1
    engines += [bundle.engine for bundle in bundles]
    channel.send(("ready", [_info(bundle, own) for bundle, own in zip(bundles, options, strict=True)]))
    return EngineLoop(engines, channel, inbox).run()


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(_LOST_PARENT)


def _read(channel: Channel, inbox: queue.SimpleQueue[Any], engines: list[Any]) -> None:
    """Hand over what arrives; engines that run ahead are told, so that nothing waits for more than the present step."""
    status = 1
    try:
        while True:
            inbox.put(channel.receive())
            for engine in engines:
                engine.interrupt()
    except EOFError:
        status = _LOST_PARENT
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # whatever the main thread is doing, nobody can talk with it any longer


def _build(options: list[dict[str, Any]]) -> list[EngineBundle]:
    from plait.engine.build import KV_SHARE, build_engine, check_options, load_model

    for own in options:
        check_options(**own)
    loaded = [load_model(**own) for own in options]
    # All weights are in memory now, and the pools' pages are touched later: what is free must do for all pools.
    share = KV_SHARE / len(options)
    return [
        build_engine(**{**own, "model": model, "kv_share": share}) for own, model in zip(options, loaded, strict=True)
    ]


def _info(bundle: EngineBundle, options: dict[str, Any]) -> ModelInfo:
    return ModelInfo(
        name=bundle.name,
        max_model_len=bundle.max_model_len,
        max_num_seqs=options["max_num_seqs"],
        limits=bundle.engine.limits,
        default_params=dict(bundle.default_params),
        precision=bundle.precision,
        report=bundle.report,
        lines=bundle.lines,
        adapters=list(bundle.adapters),
    )


class EngineLoop:
    """Takes messages, steps every engine that has work, sends what came out. Sleeps while nothing is to be done."""

    def __init__(self, engines: list[Any], channel: Channel, inbox: queue.SimpleQueue[Any]) -> None:
        self._engines = engines
        self._channel = channel
        self._inbox = inbox

    def run(self) -> int:
        """Until told to end; returns the exit status."""
        try:
            while True:
                busy = any(engine.has_unfinished() for engine in self._engines)
                touched: dict[int, list[Any]] = {}
                if not self._take_messages(touched, wait=not busy):
                    return 0
                for model, engine in enumerate(self._engines):
                    if engine.has_unfinished():
                        touched.setdefault(model, []).extend(engine.step())
                if touched:
                    steps = [(model, outputs, self._engines[model].stats()) for model, outputs in touched.items()]
                    self._channel.send(("step", steps))
        except EOFError:
            return _LOST_PARENT
        except Exception as error:
            reason = str(error)
            if not isinstance(error, EngineError):
                traceback.print_exc()
                reason = f"the engine failed: {type(error).__name__}: {error}"
            with contextlib.suppress(EOFError):
                self._channel.send(("broken", reason))
            return 1

    def _take_messages(self, touched: dict[int, list[Any]], wait: bool) -> bool:
        """Handle what has arrived; False when it is time to end. touched: models with something to report."""
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if message[0] == "shutdown":
                return False
            self._handle(message, touched)

    def _handle(self, message: tuple[Any, ...], touched: dict[int, list[Any]]) -> None:
        match message:
            case ("add", model, request):
                touched.setdefault(model, [])
                try:
                    self._engines[model].add_request(request)
                except RequestError as error:
                    self._channel.send(("refused", model, request.request_id, str(error), error.field))
                except Exception as error:  # confined to the one request, which the engine does not have then
                    traceback.print_exc()
                    touched[model] += _failed(request, f"{type(error).__name__}: {error}")
            case ("stop", model, request_id, choice):
                self._engines[model].stop(request_id, choice)
                touched.setdefault(model, [])
            case ("abort", model, request_id):
                touched.setdefault(model, []).extend(self._engines[model].abort(request_id))
            case ("check", number):
                self._channel.send(("checked", number, [_health(engine) for engine in self._engines]))
            case ("terminate",):
                self._channel.send(("terminated",))


def _failed(request: Request, message: str) -> list[TokenOutput]:
    """The last outputs of all choices of a request that failed before it began."""
    return [
        TokenOutput(request.request_id, index, finish_reason="error", error=message)
        for index in range(request.params.n)
    ]


def _health(engine: Any) -> ModelHealth:
    stats = engine.stats()
    integrity = "busy"
    if not engine.has_unfinished():
        try:
            engine.check_integrity()
            integrity = "ok"
        except Exception as error:  # a check that stumbles over broken accounts says so as well
            integrity = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return ModelHealth(integrity, stats.num_blocks, stats.num_free_blocks)
