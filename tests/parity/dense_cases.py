"""Cases of dense families beyond the first ones: at least two configurations each, with every switch of its own."""

from __future__ import annotations

from tests.parity.case import SMALL, YARN, Case, family

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_FOUR_LAYERS = SMALL | {"num_hidden_layers": 4}
_IRREGULAR = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
# Six rotating pairs: divisors that differ much between the two sets.
_LONGROPE = {
    "short_factor": [1.0, 1.1, 1.3, 1.2, 1.6, 1.9],
    "long_factor": [1.5, 2.5, 4.0, 9.0, 7.0, 13.0],
}

_gemma2 = family("gemma2", **_FOUR_LAYERS | {"hidden_size": 54}, num_key_value_heads=2, head_dim=14)
_gemma = family("gemma", **SMALL | {"hidden_size": 54}, num_key_value_heads=2, head_dim=14)
_apertus = family("apertus", **SMALL, num_key_value_heads=2)
_phi3 = family("phi3", **SMALL, num_key_value_heads=2, pad_token_id=None)
_olmo = family("olmo", **SMALL)
_olmo2 = family("olmo2", **SMALL)
_olmo3 = family("olmo3", **_FOUR_LAYERS)
_granite = family("granite", **SMALL)
_smollm3 = family("smollm3", **_FOUR_LAYERS, num_key_value_heads=2, pad_token_id=None)
_starcoder2 = family("starcoder2", **SMALL)
_cohere = family("cohere", **SMALL)
_cohere2 = family("cohere2", **_FOUR_LAYERS)
_stablelm = family("stablelm", **SMALL, num_key_value_heads=3)
_phi = family("phi", **SMALL | {"hidden_size": 96})
_glm4 = family("glm4", **SMALL, num_key_value_heads=2, head_dim=16, pad_token_id=None)
_seed_oss = family("seed_oss", **SMALL, head_dim=14, num_key_value_heads=2)
_ernie = family("ernie4_5", **SMALL, head_dim=14, num_key_value_heads=3)
_helium = family("helium", **SMALL, head_dim=12, num_key_value_heads=2)
_nemotron = family("nemotron", **SMALL | {"hidden_size": 96}, num_key_value_heads=3)
_arcee = family("arcee", **SMALL, num_key_value_heads=2)
_exaone4 = family("exaone4", **_FOUR_LAYERS, num_key_value_heads=2)
_hunyuan = family("hunyuan_v1_dense", **SMALL, num_key_value_heads=2, head_dim=14)
_falcon = family("falcon", **{k: v for k, v in SMALL.items() if k != "intermediate_size"}, ffn_hidden_size=101)
_GPT = {"vocab_size": 97, "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 128}
_gpt2 = family("gpt2", **_GPT | {"n_positions": 512}, n_inner=101)
_gptj = family("gptj", **_GPT, n_inner=101)
_opt = family(
    "opt",
    **{k: v for k, v in SMALL.items() if k != "intermediate_size"}
    | {"max_position_embeddings": 512, "hidden_size": 96},
    ffn_dim=101,
    word_embed_proj_dim=96,
)

DENSE: tuple[Case, ...] = (
    _gemma2("caps, windows on even layers, eps 0.02", sliding_window=9, rms_norm_eps=0.02, attn_logit_softcapping=3.0),
    _gemma2(
        "layer_types decide, no caps, untied, biases",
        sliding_window=6,
        layer_types=_IRREGULAR,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        query_pre_attn_scalar=24,
        rope_theta=300.0,
        hidden_activation="silu",
    ),
    _gemma("scaled embeddings, 1 + w, untied", hidden_act="silu", tie_word_embeddings=False),
    _gemma(
        "an exact GELU that means tanh, biases, eps 0.02",
        hidden_act="gelu",
        attention_bias=True,
        rope_theta=300.0,
        rms_norm_eps=0.02,
    ),
    _apertus("xIELU, llama3 scaling, eps 0.02", rms_norm_eps=0.02, rope_scaling=_LLAMA3, rope_theta=500.0),
    _apertus(
        "biases, tied, a kv head for each head",
        attention_bias=True,
        tie_word_embeddings=True,
        num_key_value_heads=None,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    _phi3("window 9, half of each head rotates", sliding_window=9, partial_rotary_factor=0.5, rope_theta=300.0),
    _phi3("no window, tied, eps 0.02", tie_word_embeddings=True, rms_norm_eps=0.02, num_key_value_heads=None),
    _phi3(
        "longrope, a token longer than its original context",
        original_max_position_embeddings=56,
        rope_scaling={"type": "longrope", **_LONGROPE},
    ),
    _phi3(
        "longrope, as long as its original context, by its old name",
        original_max_position_embeddings=57,
        rope_scaling={"type": "su", "original_max_position_embeddings": 57, **_LONGROPE},
    ),
    _olmo("clipped q, k and v", clip_qkv=0.7, num_key_value_heads=2, rope_theta=300.0),
    _olmo("not clipped, tied, biases", tie_word_embeddings=True, attention_bias=True, hidden_act="gelu"),
    _olmo2("norms after the branches, eps 0.02", rms_norm_eps=0.02, num_key_value_heads=2),
    _olmo2("biases, linear scaling", attention_bias=True, rope_scaling={"type": "linear", "factor": 4.0}),
    _olmo3(
        "three windows of four, a table for each layer type",
        sliding_window=9,
        rms_norm_eps=0.02,
        num_key_value_heads=2,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 400.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    _olmo3("yarn on full layers", sliding_window=6, layer_types=_IRREGULAR, rope_scaling=YARN, rope_theta=300.0),
    _granite(
        "all four multipliers",
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.6,
        logits_scaling=0.5,
        num_key_value_heads=2,
    ),
    _granite(
        "multipliers below one, biases, tied",
        embedding_multiplier=0.7,
        attention_multiplier=0.2,
        residual_multiplier=1.3,
        logits_scaling=2.0,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_theta=300.0,
    ),
    _smollm3("every fourth layer without rotary", tie_word_embeddings=False, rope_theta=300.0),
    _smollm3(
        "windows where nothing rotates, tied, biases",
        no_rope_layers=[0, 1, 1, 0],
        use_sliding_window=True,
        sliding_window=7,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=0.02,
    ),
    _starcoder2("window 8, tied, eps 0.02", sliding_window=8, norm_epsilon=0.02),
    _starcoder2("no window, no biases, untied", use_bias=False, tie_word_embeddings=False, num_key_value_heads=6),
    _cohere(
        "q and k normed per head, eps 0.02",
        use_qk_norm=True,
        layer_norm_eps=0.02,
        num_key_value_heads=2,
        logit_scale=0.5,
    ),
    _cohere("scaled logits, biases, untied", logit_scale=2.0, attention_bias=True, tie_word_embeddings=False),
    _cohere2("three windows of four", sliding_window=9, logit_scale=0.5, num_key_value_heads=3),
    _cohere2(
        "layer_types decide, untied",
        sliding_window=5,
        layer_types=_IRREGULAR,
        tie_word_embeddings=False,
        logit_scale=2.0,
    ),
    _stablelm(
        "a third rotates, biases on q, k and v", use_qkv_bias=True, layer_norm_eps=0.02, partial_rotary_factor=0.34
    ),
    _stablelm(
        "parallel after one norm, half rotates, tied",
        use_parallel_residual=True,
        partial_rotary_factor=0.5,
        tie_word_embeddings=True,
    ),
    _phi("half rotates, head with a bias", layer_norm_eps=0.02, num_key_value_heads=2),
    _phi("q and k normed, a quarter rotates", qk_layernorm=True, partial_rotary_factor=0.25, rope_theta=300.0),
    _glm4("half rotates in adjacent pairs", rms_norm_eps=0.02),
    _glm4(
        "everything rotates, no biases, tied", attention_bias=False, partial_rotary_factor=1.0, tie_word_embeddings=True
    ),
    _seed_oss("biases on q, k and v", rms_norm_eps=0.02),
    _seed_oss(
        "a bias on o, none on q, k and v, tied",
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_theta=300.0,
    ),
    _ernie("adjacent pairs", tie_word_embeddings=False, rms_norm_eps=0.02),
    _ernie("biases everywhere, tied", use_bias=True, rope_theta=300.0),
    _helium("adjacent pairs, eps 0.02", rms_norm_eps=0.02),
    _helium("biases on q, k, v and feed-forward", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    _nemotron("half rotates, 1 + w layer norms", norm_eps=0.02),
    _nemotron("biases, three quarters rotate, tied", attention_bias=True, mlp_bias=True, partial_rotary_factor=0.75),
    _arcee("relu squared", rms_norm_eps=0.02),
    _arcee(
        "biases, tied, head_dim, llama3 scaling", attention_bias=True, mlp_bias=True, head_dim=16, rope_scaling=_LLAMA3
    ),
    _exaone4("three windows of four", sliding_window=9, rms_norm_eps=0.02),
    _exaone4(
        "no window: every layer rotates",
        sliding_window=None,
        layer_types=["full_attention"] * 4,
        rope_theta=300.0,
        tie_word_embeddings=True,
    ),
    _hunyuan("normed after rotary, eps 0.02", rms_norm_eps=0.02),
    _hunyuan(
        "fixed alpha, biases, tied",
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    _falcon("one kv head, one norm for both", layer_norm_epsilon=0.02),
    _falcon(
        "groups, a norm for each branch, biases",
        new_decoder_architecture=True,
        num_kv_heads=2,
        bias=True,
        rope_theta=300.0,
        tie_word_embeddings=False,
    ),
    _falcon("groups, one norm for both", new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1),
    _falcon("sequential, as many kv heads as heads", parallel_attn=False, multi_query=False, bias=True),
    _gpt2("learned positions, eps 0.02", layer_norm_epsilon=0.02),
    _gpt2(
        "scores divided by the layer's number, exact GELU, untied",
        scale_attn_by_inverse_layer_idx=True,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    _gptj("a third of a head rotates", rotary_dim=8, layer_norm_epsilon=0.02),
    _gptj("the whole head rotates, exact GELU", rotary_dim=24, activation_function="gelu"),
    _opt("learned positions"),
    _opt(
        "no biases, plain norms, untied",
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        tie_word_embeddings=False,
    ),
)
