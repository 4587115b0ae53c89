"""The engine process seen from its socket, without HTTP."""

from __future__ import annotations

import asyncio

import pytest

from plait.engine.channel import HEADER
from plait.engine.client import EngineClient
from plait.engine.params import SamplingParams
from plait.engine.process import EngineProcess
from plait.engine.request import Request
from plait.errors import CapacityError, EngineError, RequestError
from plait.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow


def _options(model_dir, **options):
    return {"model": model_dir, "dtype": "fp32", "max_num_seqs": 4, "threads": 1, **options}


def _request(request_id="a", prompt=(1, 2, 3), **params):
    return Request(request_id, list(prompt), SamplingParams(ignore_eos=True, **params))


async def _collect(stream):
    return [delta async for batch in stream.batches() for _, delta in batch]


def _run(model_dir, scenario, **options):
    """scenario(client, process) on an event loop, with a loaded engine."""
    process = EngineProcess([_options(model_dir, **options)])

    async def main():
        client = EngineClient(process, [load_tokenizer(model_dir)])
        await client.start()
        result = await scenario(client, process)
        if client.death is None:
            await client.close()
        return result

    try:
        return asyncio.run(main())
    finally:
        process.end()


def test_the_end_of_the_socket_ends_a_busy_engine(model_dir):
    """What ends the engine where the kernel does not do it: this process lives on."""

    async def scenario(client, process):
        client.submit(0, [(_request(max_tokens=8000), None)])
        await asyncio.sleep(0.3)
        client._closing = True
        client._writer.close()
        return await asyncio.get_running_loop().run_in_executor(None, process.wait, 10.0)

    assert _run(model_dir, scenario) == 3


def test_the_engine_ends_quietly_when_told_to(model_dir):
    async def scenario(client, process):
        (health,) = await client.check()
        await client.close()
        return health.integrity, process.wait(5.0)

    assert _run(model_dir, scenario) == ("ok", 0)


def test_a_refusal_by_the_engine_reaches_the_one_request(model_dir):
    async def scenario(client, process):
        good = client.submit(0, [(_request("good", max_tokens=5), None)])
        bad = client.submit(0, [(_request("bad", prompt=[10**6]), None)])
        with pytest.raises(RequestError, match="vocabulary"):
            await _collect(bad)
        bad.close()
        return await _collect(good)

    deltas = _run(model_dir, scenario)
    assert sum(len(delta.token_ids) for delta in deltas) == 5
    assert deltas[-1].finish_reason == "length"


def test_an_answer_that_cannot_be_handled_fails_all_streams(model_dir):
    async def scenario(client, process):
        reasons = []
        client.on_death = reasons.append
        streams = [client.submit(0, [(_request(name, max_tokens=8000), None)]) for name in ("a", "b")]

        def fail(*_):
            raise KeyError("lost")

        client._deliver = fail
        for stream in streams:
            with pytest.raises(EngineError, match="cannot be handled: KeyError: 'lost'"):
                await asyncio.wait_for(_collect(stream), 30)
            stream.close()
        assert client.death is not None
        return reasons, await asyncio.get_running_loop().run_in_executor(None, process.wait, 10.0)

    reasons, status = _run(model_dir, scenario)
    assert len(reasons) == 1
    assert status == 3  # nobody listens to the engine any longer


def test_a_message_that_is_none_ends_the_engine_with_a_status(model_dir):
    async def scenario(client, process):
        stream = client.submit(0, [(_request(max_tokens=8000), None)])
        client._writer.write(HEADER.pack(4) + b"junk")
        with pytest.raises(EngineError, match="status 1"):
            await asyncio.wait_for(_collect(stream), 30)
        return process.wait(5.0)

    assert _run(model_dir, scenario) == 1


def test_a_failed_start_raises_the_engines_own_error(model_dir):
    process = EngineProcess([_options(model_dir, kv_memory="10KiB", max_model_len=8192)])

    async def main():
        with pytest.raises(CapacityError, match="--kv-memory"):
            await EngineClient(process, [load_tokenizer(model_dir)]).start()

    try:
        asyncio.run(main())
    finally:
        process.end()


def test_a_death_fails_what_runs_and_what_comes_later(model_dir):
    async def scenario(client, process):
        reasons = []
        client.on_death = reasons.append
        stream = client.submit(0, [(_request(max_tokens=8000), None)])
        process._process.kill()
        with pytest.raises(EngineError, match="SIGKILL"):
            await _collect(stream)
        stream.close()
        with pytest.raises(EngineError):
            client.submit(0, [(_request(), None)])
        with pytest.raises(EngineError):
            await client.check()
        return reasons

    assert len(_run(model_dir, scenario)) == 1
