"""GGUF architectures whose layers are mixtures of experts. What llama.cpp fixes in code stands here as constants.

Every layer is a mixture: llama.cpp has no dense layers among those of the architectures here.
"""

from __future__ import annotations

from typing import Any

from plait.weights.gguf_keys import (
    GROUPED,
    ROPE,
    Architecture,
    Reader,
    Row,
    bias_switch,
    head_dim,
    rope_scaling,
)

_USED = Row("expert_used_count", "num_experts_per_tok", int)
_COUNTS = (Row("expert_count", "num_experts", int), _USED)
_FULL = {"hidden_act": "silu", "use_sliding_window": False}
_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")


def _renormalised(read: Reader, always: bool) -> bool:
    """What llama.cpp does with the weights for this architecture; a key that says otherwise is refused."""
    if read.get("expert_weights_norm", bool, always) != always:
        raise read.error(f"expert_weights_norm is {not always}, which this architecture does not do")
    return always


def _expert_width(read: Reader, config: dict[str, Any]) -> int:
    """Without a key of its own, the experts that are used share the feed-forward's width."""
    return (
        read.get("expert_feed_forward_length", int, 0) or config["intermediate_size"] // config["num_experts_per_tok"]
    )


def _qwen3moe(read: Reader, config: dict[str, Any]) -> None:
    config["head_dim"] = head_dim(read, config)
    config["attention_bias"] = bias_switch(read, config, _PROJECTIONS)
    config["moe_intermediate_size"] = _expert_width(read, config)
    config["norm_topk_prob"] = _renormalised(read, True)
    rope_scaling(read, config)


def _qwen2moe(read: Reader, config: dict[str, Any]) -> None:
    width = head_dim(read, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    config["qkv_bias"] = bias_switch(read, config, _PROJECTIONS[:3])
    config["moe_intermediate_size"] = _expert_width(read, config)
    shared = read.get("expert_shared_feed_forward_length", int, 0)
    config["shared_expert_intermediate_size"] = shared or config["intermediate_size"]
    config["norm_topk_prob"] = _renormalised(read, False)
    rope_scaling(read, config)


def _mixtral(read: Reader, config: dict[str, Any]) -> None:
    config["head_dim"] = head_dim(read, config)
    _renormalised(read, True)
    rope_scaling(read, config)


def _olmoe(read: Reader, config: dict[str, Any]) -> None:
    width = head_dim(read, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        raise read.error(f"attention.key_length {width} is not embedding_length / attention.head_count: not supported")
    config["attention_bias"] = bias_switch(read, config, _PROJECTIONS)
    config["norm_topk_prob"] = _renormalised(read, False)
    rope_scaling(read, config)


MIXTURES: dict[str, Architecture] = {
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", (*GROUPED, *ROPE, *_COUNTS), _FULL, _qwen3moe),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", (*GROUPED, *ROPE, *_COUNTS), _FULL, _qwen2moe),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", (*GROUPED, *ROPE, *_COUNTS), {"hidden_act": "silu"}, _olmoe),
}

# Architectures that have another model_type where their files count experts.
WITH_EXPERTS: dict[str, Architecture] = {
    "llama": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        (*GROUPED, *ROPE, Row("expert_count", "num_local_experts", int), _USED),
        {"hidden_act": "silu"},
        _mixtral,
    ),
}
