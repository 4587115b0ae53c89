"""SmolLM2-135M-Instruct, behind the official client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.real_models import smollm2_path
from tests.server.running import running

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

STREAMS = 32
# Batches of other sizes round differently. Where the two best candidates are closer than this (twice the tolerance of
# log-probabilities in fp32, for logits up to 50), the longer text says nothing about the server.
NEAR_TIE = 2 * 1e-4 * 5


@pytest.fixture(scope="module")
def server():
    with running(str(smollm2_path()), "--dtype", "fp32", "--max-model-len", "1024", "--threads", "2") as server:
        yield server


def _question(i):
    subjects = ("foxes", "the sea", "bread", "winter", "a bicycle", "Lisbon", "owls", "the number seven")
    return [{"role": "user", "content": f"In {10 + i} words, what is special about {subjects[i % 8]}?"}]


def test_many_streams_each_equal_the_request_alone_and_no_block_stays(server):
    fields = {"model": server.get("/v1/models").json()["data"][0]["id"], "temperature": 0, "max_tokens": 16}

    async def streamed(client, i):
        stream = await client.chat.completions.create(messages=_question(i), stream=True, **fields)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
            return await asyncio.gather(*(streamed(client, i) for i in range(STREAMS)))

    together = asyncio.run(all_at_once())
    ended_early = 0
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        for i, text in enumerate(together):
            answer = client.chat.completions.create(messages=_question(i), logprobs=True, top_logprobs=2, **fields)
            alone = answer.choices[0]
            if text != alone.message.content:
                assert _gap_at_divergence(text, alone.logprobs.content) < NEAR_TIE, (text, alone.message.content)
                ended_early += 1
    print(f"{STREAMS} streams compared, {ended_early} up to a near tie only")
    assert ended_early <= 1
    assert len(set(together)) > STREAMS // 2
    server.wait_until_idle()


def _gap_at_divergence(text, entries):
    """Between the two best candidates at the first token of the lone answer that the text does not continue with."""
    so_far = b""
    for entry in entries:
        so_far += bytes(entry.bytes)
        if not text.encode().startswith(so_far):
            return entry.top_logprobs[0].logprob - entry.top_logprobs[1].logprob
    return 0.0


def test_an_answer_makes_sense_and_says_how_it_ended(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_completion_tokens=40,
        )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert "<|" not in answer.choices[0].message.content
