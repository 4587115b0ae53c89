"""Parity cases of the families with latent attention."""

from __future__ import annotations

from tests.parity.case import SMALL, YARN, Case, family

_LATENT = {
    "kv_lora_rank": 22,
    "q_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
}
_MIXTURE = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 37,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# Absent, this key is the class's own default in all families but deepseek_v2.
_HEADS = {"num_key_value_heads": 6}
_v2 = family("deepseek_v2", **SMALL, **_LATENT, **_MIXTURE)
_v3 = family("deepseek_v3", **SMALL, **_HEADS, **_LATENT, **_MIXTURE, routed_scaling_factor=1.6)
_k2 = family("kimi_k2", **SMALL, **_HEADS, **_LATENT, **_MIXTURE, n_group=1, topk_group=1, routed_scaling_factor=1.8)
_minicpm3 = family("minicpm3", **SMALL, **_HEADS, **_LATENT, scale_emb=1.3, scale_depth=1.2, dim_model_base=50)

LATENT: tuple[Case, ...] = (
    # deepseek_v2
    _v2("no rank for queries, greedy whatever the groups, eps 0.02", q_lora_rank=None, n_group=3, rms_norm_eps=0.02),
    _v2(
        "groups by their best, biases, scaled weights, yarn with both mscales, tied",
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        routed_scaling_factor=1.7,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.9, "beta_slow": 0.2},
        rope_theta=300.0,
    ),
    _v2(
        "every layer a mixture, one expert, two shared, values wider than keys",
        first_k_dense_replace=0,
        n_shared_experts=2,
        num_experts_per_tok=1,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=17,
        hidden_act="gelu",
        rope_theta=300.0,
    ),
    # deepseek_v3
    _v3(
        "groups by their two best, biases, yarn with equal mscales",
        n_group=4,
        topk_group=2,
        attention_bias=True,
        rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_slow": 0.2},
        rope_theta=300.0,
    ),
    _v3(
        "no rank for queries, halves pair up, no groups, not renormalised, tied, eps 0.02",
        q_lora_rank=None,
        rope_interleave=False,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        first_k_dense_replace=0,
        tie_word_embeddings=True,
        rms_norm_eps=0.02,
        rope_theta=300.0,
    ),
    # kimi_k2
    _k2(
        "one group, yarn over a short context",
        rope_scaling={
            **YARN,
            "original_max_position_embeddings": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 1,
            "beta_slow": 1,
        },
        rope_theta=100.0,
    ),
    _k2("two dense layers, eps 0.02, two experts", first_k_dense_replace=2, rms_norm_eps=0.02, num_experts_per_tok=2),
    # minicpm3
    _minicpm3("values as wide as hidden / heads, eps 0.02", v_head_dim=None, rms_norm_eps=0.02, rope_theta=300.0),
    _minicpm3(
        "no rank for queries, biases, an untied head, longrope past its context",
        q_lora_rank=None,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        dim_model_base=90,
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": [1.0, 1.3, 2.5],
            "long_factor": [1.2, 3.1, 9.0],
            "original_max_position_embeddings": 40,
        },
        rope_theta=300.0,
    ),
)
