"""Parity cases of the families whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from tests.parity.case import SMALL, YARN, Case, family

_qwen3_moe = family(
    "qwen3_moe",
    **SMALL,
    num_key_value_heads=2,
    head_dim=16,
    num_experts_per_tok=3,
    moe_intermediate_size=37,
)
_qwen2_moe = family(
    "qwen2_moe",
    **SMALL | {"num_hidden_layers": 4},
    num_key_value_heads=2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=37,
    shared_expert_intermediate_size=45,
)
_mixtral = family(
    "mixtral",
    **SMALL | {"intermediate_size": 43},
    num_key_value_heads=3,
    num_local_experts=5,
    num_experts_per_tok=2,
)
_olmoe = family("olmoe", **SMALL | {"intermediate_size": 43}, num_experts=8, num_experts_per_tok=3)
_granitemoe = family(
    "granitemoe",
    **SMALL | {"intermediate_size": 43},
    num_key_value_heads=2,
    num_local_experts=7,
    num_experts_per_tok=3,
    embedding_multiplier=1.4,
    attention_multiplier=0.3,
    residual_multiplier=0.7,
    logits_scaling=1.3,
)
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.2, 1.6, 1.9],
    "long_factor": [1.5, 2.5, 4.0, 9.0, 7.0, 13.0],
    "short_mscale": 1.1,
    "long_mscale": 1.4,
}
_gpt_oss = family(
    "gpt_oss",
    **SMALL | {"num_hidden_layers": 4, "intermediate_size": 37},
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=6,
    num_experts_per_tok=3,
)
_phimoe = family(
    "phimoe",
    **SMALL | {"intermediate_size": 43},
    num_key_value_heads=2,
    num_local_experts=6,
    router_jitter_noise=0.2,
    num_experts_per_tok=2,
)
_ernie_moe = family(
    "ernie4_5_moe",
    **SMALL | {"num_hidden_layers": 4},
    num_key_value_heads=2,
    moe_num_experts=6,
    moe_k=3,
    moe_intermediate_size=37,
)
_SIGMOID = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 37,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.6,
}
_dots1 = family("dots1", **SMALL, **_SIGMOID, num_key_value_heads=2)
_glm4_moe = family("glm4_moe", **SMALL, **_SIGMOID, num_key_value_heads=2)

MIXTURES: tuple[Case, ...] = (
    # qwen3_moe
    _qwen3_moe("weights as they are, eps 0.02", num_experts=7, rms_norm_eps=0.02, rope_theta=1000.0),
    _qwen3_moe(
        "renormalised, windows, biases, tied, a dense layer",
        num_experts=7,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=9,
        attention_bias=True,
        tie_word_embeddings=True,
        mlp_only_layers=[1],
        hidden_act="gelu",
    ),
    _qwen3_moe(
        "one expert of nine in every second layer, transformers 5 spelling",
        num_local_experts=9,
        num_experts_per_tok=1,
        decoder_sparse_step=2,
        num_hidden_layers=4,
        rope_parameters={**YARN, "rope_theta": 1000.0},
    ),
    # qwen2_moe
    _qwen2_moe(
        "windows on even layers below the third", use_sliding_window=True, sliding_window=8, max_window_layers=3
    ),
    _qwen2_moe(
        "renormalised, no biases, a dense layer, tied",
        norm_topk_prob=True,
        qkv_bias=False,
        mlp_only_layers=[2],
        tie_word_embeddings=True,
        rms_norm_eps=0.02,
        num_experts_per_tok=4,
    ),
    _qwen2_moe(
        "layer_types, one expert",
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_experts_per_tok=1,
        hidden_act="gelu_pytorch_tanh",
        rope_theta=300.0,
    ),
    # mixtral
    _mixtral("two of five, eps 0.02", rms_norm_eps=0.02, rope_theta=1000.0),
    _mixtral(
        "window 7, three of eight, tied",
        sliding_window=7,
        num_local_experts=8,
        num_experts_per_tok=3,
        tie_word_embeddings=True,
        rope_theta=500.0,
    ),
    _mixtral("head_dim 10, one kv head, relu", head_dim=10, num_key_value_heads=1, hidden_act="relu", rope_theta=300.0),
    # olmoe
    _olmoe("three of eight, q and k normed whole, eps 0.02", rms_norm_eps=0.02),
    _olmoe(
        "renormalised, clipped, grouped queries, biases, tied",
        norm_topk_prob=True,
        clip_qkv=1.5,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_theta=500.0,
    ),
    # granitemoe
    _granitemoe("softmax over three of seven, eps 0.02", logits_scaling=1.0, rms_norm_eps=0.02, rope_theta=1000.0),
    _granitemoe(
        "softmax over two of five, biases, tied",
        num_local_experts=5,
        num_experts_per_tok=2,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_theta=300.0,
    ),
    # dots1
    _dots1(
        "two of three groups, renormalised, a window",
        n_group=3,
        topk_group=2,
        norm_topk_prob=True,
        sliding_window=9,
        max_window_layers=1,
        rms_norm_eps=0.02,
    ),
    _dots1(
        "no groups, scores as they are, all layers mixtures, tied",
        first_k_dense_replace=0,
        n_shared_experts=2,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_theta=300.0,
    ),
    # gpt_oss
    _gpt_oss(
        "sinks, windows on even layers, yarn not truncated, eps 0.02",
        sliding_window=9,
        swiglu_limit=1.2,
        rms_norm_eps=0.02,
        rope_theta=1000.0,
        rope_scaling={**YARN, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
    ),
    _gpt_oss(
        "layer_types, no attention biases, another alpha, tied",
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        attention_bias=False,
        swiglu_limit=0.8,
        swiglu_alpha=1.3,
        tie_word_embeddings=True,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    # phimoe
    _phimoe("all biases, eps 0.02", attention_bias=True, lm_head_bias=True, rms_norm_eps=0.02, rope_theta=300.0),
    _phimoe(
        "longrope, a token longer than its original context, a window",
        sliding_window=9,
        rope_scaling={**_LONGROPE, "original_max_position_embeddings": 56},
    ),
    _phimoe(
        "longrope, as long as its original context, tied",
        rope_scaling={**_LONGROPE, "original_max_position_embeddings": 57},
        router_jitter_noise=0.1,
        num_local_experts=9,
        tie_word_embeddings=True,
    ),
    # ernie4_5_moe
    _ernie_moe("a dense layer first, biases, tied", use_bias=True, rope_theta=300.0),
    _ernie_moe(
        "one layer of four, nothing shared, a least sum, eps 0.02",
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        moe_layer_interval=2,
        moe_num_shared_experts=0,
        moe_norm_min=0.9,
        tie_word_embeddings=False,
        rms_norm_eps=0.02,
    ),
    # glm4_moe
    _glm4_moe(
        "half of the head rotates, head norms, renormalised",
        use_qk_norm=True,
        norm_topk_prob=True,
        rms_norm_eps=0.02,
        rope_theta=1000.0,
    ),
    _glm4_moe(
        "groups, biases, three quarters rotate, tied",
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        attention_bias=True,
        partial_rotary_factor=0.75,
        head_dim=16,
        num_experts_per_tok=3,
        tie_word_embeddings=True,
    ),
)
