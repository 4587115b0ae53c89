"""Random models of real architectures for the parity tests: small odd sizes, every switch on somewhere, off elsewhere.

A case is a config.json dictionary as checkpoints spell it. Old and new spellings are mixed on purpose.
"""

from __future__ import annotations

from tests.parity.case import SMALL as _SMALL
from tests.parity.case import YARN as _YARN
from tests.parity.case import Case
from tests.parity.case import family as _family
from tests.parity.dense_cases import DENSE
from tests.parity.latent_cases import LATENT
from tests.parity.mixture_cases import MIXTURES
from tests.parity.plait_gpt_cases import PLAIT_GPT

__all__ = ["CASES", "Case"]

_llama = _family("llama", **_SMALL, num_key_value_heads=2)
_mistral = _family("mistral", **_SMALL, num_key_value_heads=3)
_qwen2 = _family("qwen2", **_SMALL | {"num_hidden_layers": 4}, num_key_value_heads=2)
_qwen3 = _family("qwen3", **_SMALL, num_key_value_heads=2, head_dim=16)
_gemma3 = _family(
    "gemma3_text", **_SMALL | {"num_hidden_layers": 4, "hidden_size": 54}, num_key_value_heads=2, head_dim=14
)
_neox = _family("gpt_neox", **_SMALL | {"hidden_size": 96, "num_attention_heads": 4})

_IRREGULAR = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

CASES = (
    # llama
    _llama("grouped queries, eps 0.02", rms_norm_eps=0.02, rope_theta=500.0),
    _llama(
        "all biases, head_dim apart from hidden/heads, tied, one kv head",
        attention_bias=True,
        mlp_bias=True,
        head_dim=20,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        hidden_act="gelu_pytorch_tanh",
    ),
    _llama(
        "linear scaling by its old name, no num_key_value_heads",
        num_key_value_heads=None,
        rope_scaling={"type": "linear", "factor": 4.0},
        rms_norm_eps=1e-5,
        hidden_act="gelu",
    ),
    _llama(
        "llama3 scaling",
        rope_theta=500.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        head_dim=16,
        attention_bias=True,
    ),
    _llama("yarn", rope_scaling=_YARN, head_dim=18, hidden_act="relu"),
    _llama(
        "yarn with mscale and betas, tied",
        rope_parameters={
            **_YARN,
            "original_max_position_embeddings": 64,
            "rope_theta": 1000.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.6,
            "beta_fast": 4,
            "beta_slow": 1,
        },
        tie_word_embeddings=True,
        head_dim=16,
        mlp_bias=True,
        hidden_act="relu2",
    ),
    _llama(
        "yarn with an attention factor, not truncated",
        rope_parameters={**_YARN, "rope_theta": 1000.0, "attention_factor": 1.3, "truncate": False},
        head_dim=22,
        rms_norm_eps=0.02,
    ),
    # mistral
    _mistral("no window", sliding_window=None, rope_theta=1000.0),
    _mistral("window 7", sliding_window=7, rms_norm_eps=0.02),
    _mistral(
        "window 16, head_dim 10, tied", sliding_window=16, head_dim=10, tie_word_embeddings=True, hidden_act="gelu"
    ),
    _mistral("window 2, yarn", sliding_window=2, rope_parameters={**_YARN, "rope_theta": 100.0}, num_key_value_heads=6),
    # qwen2
    _qwen2(
        "window given and unused", sliding_window=8, use_sliding_window=False, max_window_layers=2, rope_theta=1000.0
    ),
    _qwen2(
        "window from layer 2 upward", sliding_window=8, use_sliding_window=True, max_window_layers=2, rms_norm_eps=0.02
    ),
    _qwen2(
        "layer_types decide, tied",
        sliding_window=5,
        use_sliding_window=True,
        max_window_layers=0,
        layer_types=_IRREGULAR,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    _qwen2(
        "yarn, one head per kv head", num_key_value_heads=6, rope_scaling={**_YARN, "type": "yarn"}, hidden_act="gelu"
    ),
    # qwen3
    _qwen3("head norms, eps 0.02", rms_norm_eps=0.02, rope_theta=1000.0),
    _qwen3("all attention biases, tied", attention_bias=True, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"),
    _qwen3(
        "windows from layer 1 upward, yarn",
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        rope_scaling=_YARN,
    ),
    _qwen3(
        "layer_types, linear scaling, one kv head",
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0},
        num_key_value_heads=1,
        head_dim=10,
    ),
    # gemma 3
    _gemma3(
        "five windows of six, eps 0.02, exact GELU",
        num_hidden_layers=7,
        sliding_window=9,
        rms_norm_eps=0.02,
        hidden_activation="gelu",
    ),
    _gemma3(
        "linear scaling on full layers only",
        sliding_window=8,
        sliding_window_pattern=2,
        rope_theta=1000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=24,
    ),
    _gemma3(
        "both tables by layer type, soft cap, untied, biases",
        sliding_window=6,
        layer_types=_IRREGULAR,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 400.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        final_logit_softcapping=10.0,
        attention_bias=True,
        tie_word_embeddings=False,
        query_pre_attn_scalar=10,
        hidden_activation="silu",
    ),
    _gemma3(
        "yarn on full layers, soft cap, one kv head",
        sliding_window=3,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {**_YARN, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        final_logit_softcapping=12.0,
        num_key_value_heads=1,
        head_dim=18,
        attn_logit_softcapping=2.0,
    ),
    # gpt_neox
    _neox("a quarter rotates", rotary_emb_base=1000, layer_norm_eps=0.02),
    _neox(
        "sequential residual, no attention biases", use_parallel_residual=False, attention_bias=False, rotary_pct=0.5
    ),
    _neox(
        "everything rotates, tied, tanh GELU",
        rotary_pct=1.0,
        tie_word_embeddings=True,
        hidden_act="gelu_new",
        rope_scaling={"type": "linear", "factor": 2.0},
    ),
    _neox(
        "transformers 5 spelling, sequential",
        use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.75},
        hidden_act="relu",
        layer_norm_eps=0.02,
    ),
    *DENSE,
    *MIXTURES,
    *LATENT,
    *PLAIT_GPT,
)
