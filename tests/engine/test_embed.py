"""Embeddings are transformers' last hidden states, pooled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import plait
from plait.errors import CapacityError, RequestError
from tests.configs import CONFIGS
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
