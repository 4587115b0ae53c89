"""LongRoPE in the engine: each request has one of two rotary tables for its life, and keys are not shared across."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.kernels.native import native_library, reason
from plait.model.decoder import Decoder, from_config
from plait.ops.step import StepInputs
from tests.configs import CONFIGS
from tests.threads import one_thread

__all__ = ["one_thread"]

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 64
# Heads of 6 features, of which 4 rotate.
ROPE = {"type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [3.0, 9.0]}
RAW: dict[str, Any] = {**CONFIGS["phi3"], "original_max_position_embeddings": CONTEXT, "rope_scaling": ROPE}
PROMPT = [(17 * i + i * i) % 96 for i in range(60)]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return from_config(RAW, seed=4)


def greedy(decoder: Decoder, count: int, reach: int) -> list[int]:
    """The text that a recomputation of everything, with one table throughout, gives for every next token."""
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            step = StepInputs(reach=torch.full((len(ids),), reach))
            ids.append(int(decoder.logits(decoder(torch.tensor(ids), step))[-1].argmax()))
    return ids[len(PROMPT) :]


def generate(llm: plait.LLM, count: int) -> Any:
    params = plait.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return llm.generate({"prompt_token_ids": PROMPT}, params)[0]


NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}")
)


@pytest.mark.parametrize("plan", ["reference", NATIVE])
def test_a_request_keeps_the_table_that_its_last_token_needs(decoder: Decoder, plan: str) -> None:
    """60 + 4 tokens are the original context and short; 60 + 10 are beyond, and long from the first token on."""
    llm = plait.LLM(decoder, plan=plan, kv_memory="4MiB", max_batched_tokens=64, threads=1)
    short, long = (generate(llm, n).outputs[0].token_ids for n in (4, 10))
    assert short == greedy(decoder, 4, CONTEXT)
    assert long == greedy(decoder, 10, CONTEXT + 1)
    assert long[:4] != short
    if plan == "native":
        assert llm.bundle.report["host_ops"] == ["positions_by_reach"]


def test_requests_of_the_two_tables_share_no_prefix(decoder: Decoder) -> None:
    llm = plait.LLM(decoder, plan="reference", kv_memory="4MiB", max_batched_tokens=64, threads=1)
    cached = []
    for count in (4, 10, 3, 9):
        output = generate(llm, count)
        cached.append(output.num_cached_tokens)
        reach = CONTEXT + (count > 4)
        assert output.outputs[0].token_ids == greedy(decoder, count, reach)
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 0


def test_a_model_with_one_table_puts_nothing_about_it_in_the_key() -> None:
    llm = plait.LLM(from_config(CONFIGS["phi3"]), plan="reference", kv_memory="4MiB", max_batched_tokens=64, threads=1)
    assert llm.bundle.engine.short_rope_tokens == 0


def test_a_forward_with_a_cache_must_be_told(decoder: Decoder) -> None:
    from plait.memory.dense import DenseMemory

    memory = DenseMemory(decoder.config.caches(), 1)
    with pytest.raises(plait.PlaitError, match=r"longrope.*give StepInputs\.reach"):
        decoder(torch.tensor([PROMPT]), memory=memory)
