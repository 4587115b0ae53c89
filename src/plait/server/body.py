"""Request bodies: read within limits, parsed to JSON that nothing later can trip over."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from plait.server.errors import ApiError, bad_request

MAX_DEPTH = 64
# Counted before anything is parsed, in texts too: small values take many times the memory of their characters.
MAX_COMMAS = 250_000
MAX_BRACKETS = 100_000
READ_TIMEOUT_S = 30.0
# Of a body that is refused: a client that still sends when the connection closes may never see the answer.
_DRAIN_TIMES_LIMIT = 4
_DRAIN_TIMEOUT_S = 1.0
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """The client closed the connection before the request was complete."""


async def read_json(headers: Mapping[str, str], receive: Receive, max_bytes: int) -> dict[str, Any]:
    """The JSON object of a request's body. Raises ApiError 400, 408, 413 and ClientGone."""
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    # A page of another origin can send any other type without asking first, application/json it cannot.
    if kind != "application/json":
        raise bad_request("the header Content-Type must be application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise bad_request("the body must not be compressed")
    return parse_object(await _read(headers, receive, max_bytes))


async def _read(headers: Mapping[str, str], receive: Receive, max_bytes: int) -> bytes:
    # The rest of the body may not be read, so the connection cannot be used again.
    close = {"connection": "close"}
    too_large = ApiError(413, f"the body has more than {max_bytes} bytes (--max-body-size)", headers=close)
    length = headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > max_bytes:
        if headers.get("expect", "").lower() != "100-continue":  # who asks first has sent nothing yet
            await _drain(receive, _DRAIN_TIMES_LIMIT * max_bytes)
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > max_bytes:
                    if message.get("more_body"):
                        await _drain(receive, _DRAIN_TIMES_LIMIT * max_bytes)
                    raise too_large
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s", headers=close) from None


async def _drain(receive: Receive, max_bytes: int) -> None:
    """Receives and forgets what is left of a body, within bounds."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            while size < max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
    except TimeoutError:
        return


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object from UTF-8 bytes. Refused with 400: anything else, NaN and infinities, numbers that overflow, a key
    given twice, lone surrogates, nesting beyond MAX_DEPTH, more than MAX_COMMAS or MAX_BRACKETS."""
    if data.count(b",") > MAX_COMMAS or data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
        raise bad_request(f"the body has more than {MAX_COMMAS} commas or {MAX_BRACKETS} opening brackets")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise bad_request("the body is empty: send a JSON object")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique_keys)
    except ApiError:
        raise
    except RecursionError:
        raise bad_request(f"the JSON is nested more than {MAX_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is no JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except ValueError:  # Python refuses to read integers of thousands of digits
        raise bad_request("the JSON holds a number that is too large") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    _check_depth(value)
    if _SURROGATE.search(data):
        _check_unicode(value)
    return value


def _no_constant(name: str) -> Any:
    raise bad_request(f"the body is no JSON: {name} is not allowed")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise bad_request(f"the JSON holds a number that is too large: {text:.40}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise bad_request(f"the key {twice!r:.100} is given twice", param=twice[:100])
    return result


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise bad_request(f"the JSON is nested more than {MAX_DEPTH} levels deep")


def _check_unicode(value: dict[str, Any]) -> None:
    for key, item in value.items():
        try:
            json.dumps({key: item}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            name = key.encode("ascii", "backslashreplace").decode()[:100]
            raise bad_request(f"{name} holds a lone surrogate, which is not Unicode text", param=name) from None
