"""SmolLM2-135M-Instruct, behind the official client."""

from __future__ import annotations

import asyncio

import openai
import pytest
import torch

import plait
from plait.text.tokenizer import load_tokenizer
from tests.greedy import Comparison, assert_same_texts, compare_greedy
from tests.real_models import smollm2_path
from tests.server.running import running

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

STREAMS = 32


@pytest.fixture(scope="module")
def server():
    with running(str(smollm2_path()), "--dtype", "fp32", "--max-model-len", "1024", "--threads", "2") as server:
        yield server


def _question(i):
    subjects = ("foxes", "the sea", "bread", "winter", "a bicycle", "Lisbon", "owls", "the number seven")
    return [{"role": "user", "content": f"In {10 + i} words, what is special about {subjects[i % 8]}?"}]


def test_many_streams_each_equal_the_request_alone_and_no_block_stays(server):
    fields = {"model": server.get("/v1/models").json()["data"][0]["id"], "temperature": 0, "max_tokens": 16}
    fields |= {"logprobs": True, "top_logprobs": 0}

    async def streamed(client, i):
        """The tokens as bytes."""
        stream = await client.chat.completions.create(messages=_question(i), stream=True, **fields)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
        return [bytes(entry.bytes) for part in parts if part is not None for entry in part.content]

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
            return await asyncio.gather(*(streamed(client, i) for i in range(STREAMS)))

    together = asyncio.run(all_at_once())
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        answers = [client.chat.completions.create(messages=_question(i), **fields) for i in range(STREAMS)]
    alone = [[bytes(entry.bytes) for entry in answer.choices[0].logprobs.content] for answer in answers]
    # Batches of other sizes round differently: where texts differ, the model's own logits say whether they may.
    judge = Judge(smollm2_path()) if together != alone else None
    comparisons = []
    for i, (streamed_tokens, tokens) in enumerate(zip(together, alone, strict=True)):
        if judge is None or streamed_tokens == tokens:
            comparisons.append(Comparison(len(tokens), False, None))
        else:
            comparisons.append(judge.compare(_question(i), streamed_tokens, tokens))
    assert_same_texts(comparisons, "streams and requests alone")
    assert len({b"".join(tokens) for tokens in together}) > STREAMS // 2
    server.wait_until_idle()


class Judge:
    """Decides from the logits of the whole prompt and text whether two greedy texts part at a near tie."""

    def __init__(self, path):
        self._decoder = plait.load(path, dtype=torch.float32)
        self._tokenizer = load_tokenizer(path)
        self._ids = {self._tokenizer.token_bytes(i): i for i in range(self._tokenizer.vocab_size)}

    def compare(self, messages, one, other):
        """one, other: the tokens of two different texts as bytes. A text that ends early, or goes on, differs there."""
        common = next((t for t, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if common is None:
            common = min(len(one), len(other))
            return Comparison(common, False, common)
        prompt = self._tokenizer.encode_chat(messages)
        for tokens in (one, other):
            ids = [self._ids[token] for token in tokens[: common + 1]]
            with torch.no_grad():
                logits = self._decoder.logits(self._decoder(torch.tensor([prompt + ids])))[0, len(prompt) - 1 : -1]
            comparison = compare_greedy(ids, logits)
            if not comparison.ended_early:  # at least one text left the model's choice without a near tie
                return Comparison(common, False, common)
        return comparison


@pytest.mark.parametrize("tokens, same", [([], False), ([b"x"], False)])
def test_a_text_that_ends_early_is_no_near_tie(tokens, same):
    judge = Judge.__new__(Judge)
    assert (judge.compare([], [*tokens, b"y"], tokens).difference is None) is same


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
