"""Who may ask: API keys, and the headers that keep other sites' pages out."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any

from plait.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/", "/chat.css", "/chat.js", "/favicon.ico"})


class Keys:
    """The accepted API keys. Compared as digests in constant time; which one matched takes no different time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, authorization: list[bytes]) -> bool:
        """authorization: the values of the request's Authorization headers; exactly one "Bearer KEY" is right.

        The scheme's case does not matter, the key is everything after the one space."""
        if len(authorization) != 1:
            return False
        scheme, _, key = authorization[0].partition(b" ")
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyGuard:
    """ASGI: everything but OPEN_PATHS answers 401 without a key. With deep=1 /health is not open either."""

    def __init__(self, app: Any, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if not self._keys.accept(given):
                wrong = "the API key is wrong" if given else "an API key is needed"
                error = ApiError(
                    401,
                    f"{wrong}: send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await send_error(send, error)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Any) -> bool:
        if scope["path"] == "/health":
            return not scope["query_string"]
        return scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")


def loopback_hosts(host: str) -> frozenset[str]:
    """The names by which a server that is bound to the loopback address `host` may be asked."""
    return frozenset({"localhost", "127.0.0.1", "::1", host.lower()})


class HostGuard:
    """ASGI: answers 403 to a Host header with a name that is not in `hosts`; the port does not matter.

    A page of another site can have its own name resolved to this machine, and is then of the same origin for the
    browser: only the name that it asks for tells it apart.
    """

    def __init__(self, app: Any, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and _host_name(value) not in self._hosts:
                    shown = value.decode("ascii", "backslashreplace")
                    text = f"the host {shown!r:.100} is not this server's name: use localhost, or set --api-key"
                    await send_error(send, ApiError(403, text, code="host_not_allowed"))
                    return
        await self._app(scope, receive, send)


def _host_name(value: bytes) -> str:
    """A Host header without port, brackets and final dot, in lower case."""
    text = value.decode("ascii", "backslashreplace").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


async def send_error(send: Any, error: ApiError) -> None:
    """An error answer straight through ASGI."""
    body = error.encoded()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
