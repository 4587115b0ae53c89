"""A small configuration per registered family, in the spelling of config.json. Windows and head counts are uneven on
purpose."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama", "attention_bias": True},
    "mistral": {**_COMMON, "model_type": "mistral", "sliding_window": 11, "head_dim": 10},
    "qwen2": {
        **_COMMON,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 1},
    "gemma3_text": {
        **_COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 8,
        "sliding_window": 13,
        "query_pre_attn_scalar": 10,
        "final_logit_softcapping": 20.0,
    },
    "gpt_neox": {
        **{k: v for k, v in _COMMON.items() if k != "num_key_value_heads"},
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "rotary_pct": 0.5,
    },
}
