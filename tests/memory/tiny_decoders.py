"""Decoders of a few thousand weights, one per family, whose logits depend visibly on every key that a query sees."""

from __future__ import annotations

from typing import Any

import torch

import plait
from plait.model.decoder import Decoder

_COMMON: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 100.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 8,
    },
    "gemma3_text": {"sliding_window": 7, "sliding_window_pattern": 3, "num_hidden_layers": 3, "head_dim": 8},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "deepseek_v3": {
        "num_key_value_heads": None,
        "kv_lora_rank": 4,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 2,
        "qk_rope_head_dim": 4,
        "v_head_dim": 2,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gpt_neox": {"hidden_size": 32, "rotary_pct": 0.5, "num_key_value_heads": None, "rope_theta": None},
}


def tiny_decoder(family: str, **changes: Any) -> Decoder:
    """A decoder in fp32 with weights as parity tests have them; changes: config keys."""
    raw = {"model_type": family, **_COMMON, **CONFIGS[family], **changes}
    decoder = plait.from_config({k: v for k, v in raw.items() if v is not None})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p.add_(0.3 * noise)
            elif name == "model.embed_tokens.weight":
                p.copy_(noise * (0.6 if decoder.config.tie_embeddings else 1.5))
            else:
                p.copy_(noise * (1.5 if name == "lm_head.weight" else 1.0) / p.shape[-1] ** 0.5)
    return decoder
