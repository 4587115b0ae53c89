"""The small configurations of dense families beyond the first ones, for tests/configs.py."""

from __future__ import annotations

from typing import Any


def dense_configs(common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Family -> config.json, over the sizes that all of them share."""
    gpt = {"vocab_size": 96, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 40}
    opt = {key: value for key, value in common.items() if key not in ("intermediate_size", "num_key_value_heads")}
    configs = {
        "gemma2": {**common, "head_dim": 8, "sliding_window": 13, "query_pre_attn_scalar": 10},
        "gemma": {**common, "head_dim": 8},
        "apertus": {**common, "pad_token_id": None},
        "phi3": {**common, "sliding_window": 11, "partial_rotary_factor": 0.75, "pad_token_id": None},
        "olmo": {**common, "clip_qkv": 3.0},
        "olmo2": common,
        "olmo3": {**common, "num_hidden_layers": 4, "sliding_window": 13},
        "granite": {
            **common,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
        "smollm3": {
            **common,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "pad_token_id": None,
        },
        "starcoder2": {**common, "sliding_window": 11},
        "cohere": {**common, "use_qk_norm": True},
        "cohere2": {**common, "num_hidden_layers": 4, "sliding_window": 13},
        "stablelm": {**common, "partial_rotary_factor": 0.75, "use_qkv_bias": True},
        "phi": {**common, "partial_rotary_factor": 0.75},
        "glm4": {**common, "head_dim": 8, "pad_token_id": None},
        "seed_oss": {**common, "head_dim": 8},
        "ernie4_5": {**common, "head_dim": 8, "use_bias": True},
        "helium": {**common, "head_dim": 6},
        "nemotron": {**common, "hidden_size": 32},
        "arcee": {**common, "mlp_bias": True},
        "exaone4": {**common, "num_hidden_layers": 4, "sliding_window": 13},
        "hunyuan_v1_dense": {**common, "head_dim": 8},
        "falcon": {**opt, "ffn_hidden_size": 40},
        "gpt2": {**gpt, "initializer_range": 0.3, "eos_token_id": 1},
        "gptj": {**gpt, "rotary_dim": 4, "initializer_range": 0.3, "eos_token_id": 1},
        "opt": {**opt, "ffn_dim": 40, "word_embed_proj_dim": 24},
    }
    return {family: {**config, "model_type": family} for family, config in configs.items()}
