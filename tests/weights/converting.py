"""Tiny random models for the tests of `convert`: every parameter random, so that a norm that is off by one shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import plait
from plait.model.decoder import Decoder
from tests.tiny import VOCAB_SIZE, write_tokenizer

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "rope_theta": 500.0, "attention_bias": True, "head_dim": 24},
    "llama3": {"model_type": "llama", **_SIZES, "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "qwen2": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 24, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        **_SIZES,
        "num_hidden_layers": 7,
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen2moe": {
        "model_type": "qwen2_moe",
        **_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "phi3": {"model_type": "phi3", **_SIZES, "sliding_window": None},
}


def random_decoder(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    """A decoder of one of `FAMILIES`; changes: keys of its configuration."""
    raw = {**FAMILIES[family], "dtype": str(dtype).removeprefix("torch."), **changes}
    decoder = plait.from_config(raw, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.3
            centre = 0.0 if "gemma" in family or not name.endswith("norm.weight") else 1.0
            parameter.copy_(values + centre)
    return decoder


def model_directory(parent: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """The same as a directory with a tokenizer."""
    directory = parent / f"{family}-{len(list(parent.iterdir()))}"
    random_decoder(family, dtype, **changes).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def logits(path: Path) -> torch.Tensor:
    """Of a text longer than every window, in fp32."""
    decoder: Any = plait.load(path, "fp32")
    with torch.inference_mode():
        return decoder.logits(decoder(torch.arange(40)[None] * 5 % 250))
