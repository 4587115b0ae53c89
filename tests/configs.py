"""A small configuration per registered family, in the spelling of config.json. Windows and head counts are uneven on
purpose."""

from __future__ import annotations

from typing import Any

from tests.dense_configs import dense_configs

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

_SIGMOID: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
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
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        **_COMMON,
        "model_type": "qwen2_moe",
        "use_sliding_window": True,
        "sliding_window": 9,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20,
        "decoder_sparse_step": 2,
    },
    "mixtral": {
        **_COMMON,
        "model_type": "mixtral",
        "sliding_window": 11,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "olmoe": {**_COMMON, "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 3.0},
    "granitemoe": {
        **_COMMON,
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.5,
        "logits_scaling": 1.3,
    },
    "dots1": {**_COMMON, **_SIGMOID, "model_type": "dots1", "sliding_window": 9, "max_window_layers": 1},
    "gpt_oss": {
        **_COMMON,
        "model_type": "gpt_oss",
        "head_dim": 8,
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
    },
    "phimoe": {
        **_COMMON,
        "model_type": "phimoe",
        "num_local_experts": 5,
        "router_jitter_noise": 0.2,
        "attention_bias": True,
        "lm_head_bias": True,
        "bos_token_id": None,
    },
    "ernie4_5_moe": {
        **_COMMON,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_norm_min": 0.9,
        "use_bias": True,
    },
    "glm4_moe": {**_COMMON, **_SIGMOID, "model_type": "glm4_moe", "use_qk_norm": True, "head_dim": 8},
}

_LATENT: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}

CONFIGS |= {
    "deepseek_v2": {
        **_LATENT,
        **_SIGMOID,
        "model_type": "deepseek_v2",
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
        "attention_bias": True,
    },
    "deepseek_v3": {**_LATENT, **_SIGMOID, "model_type": "deepseek_v3", "first_k_dense_replace": 1},
    "kimi_k2": {
        **_LATENT,
        **_SIGMOID,
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "minicpm3": {**_LATENT, "model_type": "minicpm3", "scale_emb": 1.5, "dim_model_base": 20},
}

CONFIGS |= dense_configs(_COMMON)
CONFIGS["plait_gpt"] = {
    "model_type": "plait_gpt",
    "vocab_size": 96,
    "d_model": 24,
    "n_layers": 3,
    "n_heads": 4,
    "n_ctx": 512,
    "use_moe": True,
    "n_experts": 5,
    "top_k": 2,
    "n_shared": 1,
    "d_expert": 16,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}
