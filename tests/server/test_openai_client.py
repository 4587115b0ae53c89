"""The official client, unmodified, against a running server."""

from __future__ import annotations

import asyncio

import openai
import pytest

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
GREEDY = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_lists_and_retrieves_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.owned_by == "plait" and model.max_model_len == 8192
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.models.retrieve("nothing")


def test_chat_streams_the_text_of_the_whole_answer(client):
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    # The second request finds the first one's prompt in the cache, whole blocks of it.
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16


def test_completions_stream_the_text_of_the_whole_answer(client):
    whole = client.completions.create(model="tiny", prompt="Once", **GREEDY)
    chunks = client.completions.create(model="tiny", prompt="Once", stream=True, **GREEDY)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


def test_async_client_runs_many_streams_each_as_if_alone(server):
    prompts = [f"Prompt number {i} is {'x' * i}" for i in range(32)]

    async def text(client, prompt):
        stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(text(client, prompt) for prompt in prompts))

    alone = [server.complete(prompt=p, temperature=0, max_tokens=24, ignore_eos=True) for p in prompts]
    together = asyncio.run(all_at_once())
    assert together == [answer["choices"][0]["text"] for answer in alone]
    assert len(set(together)) > 16
    server.wait_until_idle()


def test_seeded_choices_differ_and_repeat(client):
    def sample(n):
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=n, seed=7, max_tokens=12)
        return [choice.message.content for choice in answer.choices]

    four = sample(4)
    assert len(set(four)) == 4
    assert sample(4) == four
    assert sample(1) == four[:1]


def test_chat_logprobs_have_the_documented_shape(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 5
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob == values[0]  # greedy
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode("utf-8", "replace") == answer.choices[0].message.content


def test_errors_are_the_clients_own_types(client):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
