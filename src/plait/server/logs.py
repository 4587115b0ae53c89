"""One log line per request: what it was, how long it took, how it ended. Prompts and answers are not in it."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from plait.server.errors import api_error
from plait.server.security import send_error

log = logging.getLogger("plait.server")
_QUIET = frozenset({"/health", "/ready", "/metrics", "/", "/chat.css", "/chat.js", "/favicon.ico"})


class RequestLog:
    """ASGI: writes the line, and answers what escaped every handler with a 500 in OpenAI's shape.

    Handlers add facts to scope["plait.log"].
    """

    def __init__(self, app: Any, as_json: bool) -> None:
        self._app = app
        self._as_json = as_json

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts: dict[str, Any] = {}
        scope["plait.log"] = facts
        status = 0

        async def watch(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        start = time.monotonic()
        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            log.exception("a request failed")
            if not status:
                await send_error(watch, api_error(error))
        finally:
            if scope["path"] not in _QUIET or status >= 500:
                self._write(scope, status, time.monotonic() - start, facts)

    def _write(self, scope: Any, status: int, seconds: float, facts: dict[str, Any]) -> None:
        line = {"method": scope["method"], "path": scope["path"][:200], "status": status, "seconds": round(seconds, 3)}
        line |= facts
        if self._as_json:
            log.info("%s", json.dumps({"time": round(time.time(), 3), **line}))
        else:
            log.info("%s", " ".join(f"{name}={_word(value)}" for name, value in line.items()))


def _word(value: Any) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


def configure_logging(as_json: bool) -> None:
    """Lines of plait.server on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s" if as_json else "%(asctime)s %(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
