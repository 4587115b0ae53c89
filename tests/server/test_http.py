"""Connections and bodies that do not behave, on a real socket where it matters."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import uvicorn

from plait.server import body, http
from plait.server.body import read_json
from plait.server.errors import ApiError
from plait.server.http import HeadTimeoutProtocol

pytestmark = pytest.mark.slow

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
JSON = {"content-type": "application/json"}


async def _app(scope, receive, send):
    """Answers after half a second."""
    await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def _connection():
    config = uvicorn.Config(_app, port=0, http=HeadTimeoutProtocol, lifespan="off", ws="none", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()
    server.should_exit = True
    await task


@pytest.mark.parametrize("sent", [b"", b"G", HEAD])
def test_a_head_that_is_not_finished_ends_the_connection(sent, monkeypatch):
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.2)

    async def scenario():
        async with _connection() as (reader, writer):
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), 20) == b""

    asyncio.run(scenario())


def test_dripping_bytes_gain_no_time(monkeypatch):
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.2)

    async def scenario():
        async with _connection() as (reader, writer):
            end = asyncio.create_task(reader.read())
            writer.write(HEAD)
            for _ in range(200):
                if end.done():
                    break
                writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0.05)
            assert end.done()
            end.exception()  # a reset is as good as an end

    asyncio.run(scenario())


def test_an_answer_may_take_longer_than_a_head(monkeypatch):
    """The answer takes longer than the head may, twice, and an idle connection waits for its next request."""
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.3)

    async def scenario():
        async with _connection() as (reader, writer):
            for _ in range(2):
                writer.write(HEAD + b"\r\n")
                assert (await asyncio.wait_for(reader.readuntil(b"ok"), 20)).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.5)
            writer.write(HEAD)
            assert await asyncio.wait_for(reader.read(), 20) == b""

    asyncio.run(scenario())


def _receive(chunks):
    async def receive():
        chunk = chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    return receive


@pytest.mark.parametrize("headers", [{"content-length": "300"}, {}])
def test_a_body_that_is_too_large_is_received_so_that_the_answer_is_seen(headers):
    chunks = [b"x" * 100] * 3
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_json({**JSON, **headers}, _receive(chunks), 150))
    assert caught.value.status == 413 and not chunks


def test_of_a_body_without_end_a_bounded_part_is_received():
    chunks = [b"x" * 100] * 1000
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_json({**JSON, "content-length": "100000"}, _receive(chunks), 150))
    assert caught.value.status == 413 and len(chunks) == 1000 - 4 * 150 // 100


def test_a_body_that_never_comes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(body, "_DRAIN_TIMEOUT_S", 0.05)

    async def never():
        await asyncio.Event().wait()

    for headers in ({}, {"expect": "100-continue"}):
        with pytest.raises(ApiError) as caught:
            asyncio.run(asyncio.wait_for(read_json({**JSON, **headers, "content-length": "300"}, never, 150), 20))
        assert caught.value.status == 413
