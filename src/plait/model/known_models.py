"""Public configurations by name, for arithmetic without a checkpoint.

Models of registered families stand here as the config.json dictionary that their authors publish (only the keys that
matter); the others as the facts that the cache depends on, until their family is registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.model.families import parse_config
from plait.model.kv_arithmetic import CacheFacts, facts_of
from plait.ops.spec import LayerCache


def known_models() -> list[CacheFacts]:
    """Every model of the table: first those of registered families, then the others."""
    return [*(facts_of(name, parse_config(raw)) for name, raw in _CONFIGS.items()), *_FACTS]


def arithmetic_only() -> set[str]:
    """Names of known models whose family this version does not run."""
    return {facts.model for facts in _FACTS}


def _config(model_type: str, sizes: tuple[int, int, int, int, int], **keys: Any) -> dict[str, Any]:
    """sizes: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads."""
    hidden, ffn, layers, heads, kv_heads = sizes
    config = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return config | keys


def _llama3(sizes: tuple[int, int, int, int, int], factor: float, **keys: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    common = {
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
    }
    return _config("llama", sizes, **(common | keys))


def _smollm2(sizes: tuple[int, int, int, int, int], theta: float = 100_000.0) -> dict[str, Any]:
    return _config(
        "llama",
        sizes,
        vocab_size=49_152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        tie_word_embeddings=True,
    )


def _qwen2(sizes: tuple[int, int, int, int, int], vocab_size: int, tied: bool, positions: int) -> dict[str, Any]:
    return _config(
        "qwen2",
        sizes,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        # Written, and switched off: no layer of these models has a window.
        use_sliding_window=False,
        sliding_window=positions,
        max_window_layers=sizes[2],
    )


def _qwen3(sizes: tuple[int, int, int, int, int], tied: bool) -> dict[str, Any]:
    return _config(
        "qwen3",
        sizes,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        use_sliding_window=False,
    )


def _gemma3(sizes: tuple[int, int, int, int, int], window: int, **keys: Any) -> dict[str, Any]:
    common = {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    return _config("gemma3_text", sizes, **(common | keys))


def _deepseek(
    model_type: str, sizes: tuple[int, int, int, int], factor: float, mscale: float, **keys: Any
) -> dict[str, Any]:
    """sizes: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads."""
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32 if factor == 40.0 else 1,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
    common = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": scaling,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    }
    return _config(model_type, (*sizes, sizes[3]), **(common | keys))


def _pythia(hidden: int, layers: int, heads: int, vocab_size: int = 50_304) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
    }


_SMALL_GEMMA = {"vocab_size": 262_144, "max_position_embeddings": 32_768, "rope_scaling": None}

_CONFIGS: Mapping[str, dict[str, Any]] = {
    "SmolLM2-135M": _smollm2((576, 1536, 30, 9, 3)),
    "SmolLM2-360M": _smollm2((960, 2560, 32, 15, 5)),
    "SmolLM2-1.7B": _smollm2((2048, 8192, 24, 32, 32), theta=130_000.0),
    "Llama-3.2-1B": _llama3((2048, 8192, 16, 32, 8), 32.0, head_dim=64, tie_word_embeddings=True),
    "Llama-3.2-3B": _llama3((3072, 8192, 28, 24, 8), 32.0, head_dim=128, tie_word_embeddings=True),
    "Llama-3.1-8B": _llama3((4096, 14_336, 32, 32, 8), 8.0),
    "Llama-3.1-70B": _llama3((8192, 28_672, 80, 64, 8), 8.0),
    "Llama-3.1-405B": _llama3((16_384, 53_248, 126, 128, 8), 8.0),
    "Mistral-7B-v0.1": _config(
        "mistral",
        (4096, 14_336, 32, 32, 8),
        vocab_size=32_000,
        max_position_embeddings=32_768,
        sliding_window=4096,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-0.5B": _qwen2((896, 4864, 24, 14, 2), 151_936, True, 32_768),
    "Qwen2.5-1.5B": _qwen2((1536, 8960, 28, 12, 2), 151_936, True, 131_072),
    "Qwen2.5-7B": _qwen2((3584, 18_944, 28, 28, 4), 152_064, False, 131_072),
    "Qwen3-0.6B": _qwen3((1024, 3072, 28, 16, 8), tied=True),
    "Qwen3-1.7B": _qwen3((2048, 6144, 28, 16, 8), tied=True),
    "Qwen3-4B": _qwen3((2560, 9728, 36, 32, 8), tied=True),
    "Qwen3-8B": _qwen3((4096, 12_288, 36, 32, 8), tied=False),
    "Qwen3-14B": _qwen3((5120, 17_408, 40, 40, 8), tied=False),
    "Qwen3-32B": _qwen3((5120, 25_600, 64, 64, 8), tied=False),
    "Qwen3-30B-A3B": _qwen3((2048, 6144, 48, 32, 4), tied=False)
    | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Mixtral-8x7B-v0.1": _config(
        "mixtral",
        (4096, 14_336, 32, 32, 8),
        vocab_size=32_000,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "Gemma-3-270M": _gemma3((640, 2048, 18, 4, 1), 512, **_SMALL_GEMMA),
    "Gemma-3-1B": _gemma3((1152, 6912, 26, 4, 1), 512, **_SMALL_GEMMA),
    "Gemma-3-4B": _gemma3((2560, 10_240, 34, 8, 4), 1024),
    "Gemma-3-12B": _gemma3((3840, 15_360, 48, 16, 8), 1024),
    "Gemma-3-27B": _gemma3((5376, 21_504, 62, 32, 16), 1024, head_dim=128, query_pre_attn_scalar=168),
    "DeepSeek-V2-Lite": _deepseek(
        "deepseek_v2",
        (2048, 10_944, 27, 16),
        40.0,
        0.707,
        q_lora_rank=None,
        vocab_size=102_400,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        topk_method="greedy",
    ),
    "DeepSeek-V2": _deepseek(
        "deepseek_v2",
        (5120, 12_288, 60, 128),
        40.0,
        0.707,
        vocab_size=102_400,
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
    ),
    "DeepSeek-V3": _deepseek(
        "deepseek_v3",
        (7168, 18_432, 61, 128),
        40.0,
        1.0,
        vocab_size=129_280,
        first_k_dense_replace=3,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "Kimi-K2": _deepseek(
        "kimi_k2",
        (7168, 18_432, 61, 64),
        32.0,
        1.0,
        vocab_size=163_840,
        max_position_embeddings=131_072,
        rope_theta=50_000.0,
        n_routed_experts=384,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
    ),
    "Pythia-160M": _pythia(768, 12, 12),
    "Pythia-410M": _pythia(1024, 24, 16),
    "Pythia-1.4B": _pythia(2048, 24, 16),
    "Pythia-6.9B": _pythia(4096, 32, 32, vocab_size=50_432),
}


def _gpt_oss(name: str, layers: int, billions: float) -> CacheFacts:
    """Windowed and full layers by turns, the first one windowed."""
    caches = tuple(LayerCache(8, 64, 64, window=0 if i % 2 else 128) for i in range(layers))
    return CacheFacts(name, caches, layers * 64 * 2 * 64, round(billions * 1e9))


_FACTS = (
    _gpt_oss("gpt-oss-20b", 24, 20.9),
    _gpt_oss("gpt-oss-120b", 36, 116.8),
)
