"""How answers leave: as one document or as server-sent events, never after the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from plait.server.call import Call
from plait.server.deadline import Deadline, disconnected
from plait.server.errors import ApiError, api_error

log = logging.getLogger("plait.server")

CLIENT_GONE = 499
_DONE = b"data: [DONE]\n\n"


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON document; characters beyond ASCII as UTF-8."""
    return Response(dumps(document), status, headers, media_type="application/json")


def dumps(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(document: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(document) + b"\n\n"


async def answer(request: Request, call: Call, build: Awaitable[Any], deadline: Deadline) -> Response:
    """The document that `build` makes; the call is aborted when the client leaves or the deadline passes first."""
    work = asyncio.ensure_future(build)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({work, gone}, timeout=deadline.left_s(), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return json_response(work.result())
        if gone.done():
            return Response(status_code=CLIENT_GONE)
        raise deadline.error()
    finally:
        for task in (work, gone):
            task.cancel()
        call.close()


class EventStream(Response):
    """Server-sent events of a call; a failure becomes an event with an error object; then one [DONE]."""

    def __init__(self, call: Call, events: AsyncIterator[bytes], deadline: Deadline) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # The base class thinks of a body that is known.
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._call = call
        self._events = events
        self._deadline = deadline

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        work = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except OSError:  # the connection broke while something was being sent
            pass
        finally:
            for task in (work, gone):
                task.cancel()
            self._call.close()

    async def _send_all(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._deadline.left_s()):
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            await self._send_error(send, self._deadline.error())
        except OSError:
            raise
        except Exception as error:
            answer = api_error(error)
            if answer.status == 500 and not isinstance(error, ApiError):
                log.exception("a stream failed")
            await self._send_error(send, answer)
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _send_error(self, send: Any, error: ApiError) -> None:
        await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
