"""Embeddings are transformers' last hidden states, pooled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import plait
from plait.engine.executor import StepResult
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from plait.errors import CapacityError, RequestError
from tests.configs import CONFIGS
from tests.engine.toy_model import (
    PROMPT,
    VOCAB,
    ToyExecutor,
    hidden_of,
    make_engine,
    run_to_end,
    states_without_cache,
)
from tests.tiny import tiny_model_dir

PROMPTS = [[5, 6, 7], list(range(2, 40)), [9]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_pooled_hidden_states_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    decoder = plait.from_config(CONFIGS[family], seed=6)
    decoder.save_pretrained(tmp_path / "model")
    reference = AutoModel.from_pretrained(tmp_path / "model").eval()
    llm = plait.LLM(decoder, threads=1)
    for pooling in ("last", "mean"):
        results = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], pooling=pooling, normalize=False)
        for ids, result in zip(PROMPTS, results, strict=True):
            with torch.inference_mode():
                hidden = reference(torch.tensor([ids])).last_hidden_state[0]
            expected = hidden[-1] if pooling == "last" else hidden.mean(0)
            torch.testing.assert_close(torch.tensor(result.outputs.embedding), expected, atol=2e-4, rtol=1e-4)
            assert result.prompt_token_ids == ids


def test_texts_become_vectors_of_length_one(tmp_path: Path) -> None:
    llm = plait.LLM(tiny_model_dir(tmp_path), threads=1, max_model_len=64)
    one, other = llm.embed(["hello", "world"])
    assert one.prompt == "hello"
    for result in (one, other):
        assert sum(x * x for x in result.outputs.embedding) == pytest.approx(1)
    assert one.outputs.embedding != other.outputs.embedding


def test_what_cannot_be_embedded_is_refused() -> None:
    llm = plait.LLM(plait.from_config(CONFIGS["llama"]), threads=1, max_model_len=16)
    with pytest.raises(CapacityError, match="17 tokens.*16"):
        llm.embed({"prompt_token_ids": [1] * 17})
    with pytest.raises(RequestError, match="96"):
        llm.embed({"prompt_token_ids": [96]})
    with pytest.raises(RequestError, match="without tokens"):
        llm.embed({"prompt_token_ids": []})
    with pytest.raises(RequestError, match="pooling"):
        llm.embed({"prompt_token_ids": [1]}, pooling="max")


def test_a_model_in_training_is_embedded_without_dropout_and_goes_on_training() -> None:
    decoder = plait.from_config({**CONFIGS["gpt_neox"], "hidden_dropout": 0.5})
    llm = plait.LLM(decoder, threads=1)
    expected = llm.embed({"prompt_token_ids": [5, 6, 7]})[0].outputs.embedding
    decoder.train()
    decoder.model.norm.eval()
    assert llm.embed({"prompt_token_ids": [5, 6, 7]})[0].outputs.embedding == expected
    assert decoder.training and decoder.model.layers[0].training and not decoder.model.norm.training


# In the engine


def pooled_alone(executor: ToyExecutor, prompt: list[int], pooling: str) -> np.ndarray:
    hidden = hidden_of(states_without_cache(executor, np.array(prompt))).astype(np.float64)
    return hidden[-1] if pooling == "last" else hidden.mean(axis=0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states_are_pooled_over_chunks_beside_other_requests(pooling: str) -> None:
    executor = ToyExecutor(num_blocks=40)
    engine = make_engine(executor, max_batched_tokens=8)
    prompts = {f"e{n}": [(i * 7 + n) % VOCAB for i in range(n)] for n in (1, 4, 23, 40)}
    engine.add_request(Request("text", PROMPT, SamplingParams(temperature=0, max_tokens=20)))
    for _ in range(2):  # the second time the prefix cache holds the prompts, and must not be used
        for name, prompt in prompts.items():
            engine.add_request(Request(name, prompt, pooling=pooling))
        outputs = run_to_end(engine)
        for name, prompt in prompts.items():
            (output,) = outputs[name, 0]
            assert (output.token_ids, output.finish_reason, output.num_cached_tokens) == ([], "length", 0)
            assert output.embedding == pytest.approx(pooled_alone(executor, prompt, pooling).tolist(), abs=1e-6)
    assert any(hidden for _, hidden in executor.wanted) and not all(hidden for _, hidden in executor.wanted)


def test_an_embedding_that_is_preempted_or_meets_new_weights_is_computed_anew() -> None:
    executor = ToyExecutor(num_blocks=60)
    engine = make_engine(executor, max_batched_tokens=8)
    prompt = list(range(40))
    engine.add_request(Request("a", prompt, pooling="mean"))
    for _ in range(3):
        assert engine.step() == []
    engine.scheduler.preempt(engine.scheduler.running[0])
    (output,) = run_to_end(engine)["a", 0]
    assert output.embedding == pytest.approx(pooled_alone(executor, prompt, "mean").tolist(), abs=1e-6)
    engine.add_request(Request("a", prompt, pooling="mean"))
    for _ in range(3):
        engine.step()
    executor.weights = np.uint64(99)
    engine.refresh()
    (output,) = run_to_end(engine)["a", 0]
    assert output.embedding == pytest.approx(pooled_alone(executor, prompt, "mean").tolist(), abs=1e-6)


def test_an_executor_without_hidden_states_or_with_broken_ones_fails_the_request_only() -> None:
    class Without(ToyExecutor):
        value: float | None = None

        def execute(self, token_ids: np.ndarray, inputs: object, **wanted: bool) -> StepResult:
            result = super().execute(token_ids, inputs, **wanted)
            hidden = None if self.value is None or result.hidden is None else result.hidden * np.float32(self.value)
            return replace(result, hidden=hidden)

    engine = make_engine(Without())
    for value, message in ((None, "gives no hidden states"), (np.nan, "not finite")):
        engine.executor.value = value
        engine.add_request(Request("a", PROMPT, pooling="last"))
        engine.add_request(Request("b", PROMPT, SamplingParams(temperature=0)))
        outputs = run_to_end(engine)
        assert outputs["b", 0][-1].finish_reason == "length"
        (output,) = outputs["a", 0]
        assert output.finish_reason == "error" and message in output.error and output.embedding is None
