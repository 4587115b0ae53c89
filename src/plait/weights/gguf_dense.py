"""How the GGUF metadata of dense architectures beyond the first ones reads; see gguf_config.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.weights.gguf_keys import (
    ATTENTION,
    FEED_FORWARD,
    GROUPED,
    ROPE,
    SIZES,
    Architecture,
    Reader,
    Row,
    bias_switch,
    fraction_of,
    head_dim,
    rope_scaling,
)

# The two sets of divisors of a longrope model; `weights/checkpoint.py` puts their values into the configuration.
FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_GEMMA2_27B_LAYERS = 46


def _gemma2(read: Reader, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    width = config["head_dim"] = head_dim(read, config)
    # Only the 27B scales by the width that hidden / heads would give; no key says so.
    hidden_width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = hidden_width if layers == _GEMMA2_27B_LAYERS else width
    config["sliding_window"] = read.get("attention.sliding_window", int, 4096) or None
    config["attn_logit_softcapping"] = read.get("attn_logit_softcapping", float, 50.0) or None
    config["final_logit_softcapping"] = read.get("final_logit_softcapping", float, 30.0) or None
    if config["sliding_window"] is None:
        config["layer_types"] = ["full_attention"] * layers
    rope_scaling(read, config)


def _phi3(read: Reader, config: dict[str, Any]) -> None:
    """A window that is written is obeyed (llama.cpp leaves it off)."""
    width = head_dim(read, config, rotate_whole=False)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    rotary = read.get("rope.dimension_count", int, width)
    if not 0 < rotary <= width or rotary % 2:
        raise read.error(f"rope.dimension_count is {rotary} of a head's {width}; it must be even and fit")
    config["partial_rotary_factor"] = fraction_of(rotary, width)
    config["sliding_window"] = read.get("attention.sliding_window", int, 0) or None
    original = read.get("rope.scaling.original_context_length", int, config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    found = [name in read.tensors for name in FACTORS.values()]
    if any(found):
        if not all(found):
            raise read.error(f"{' and '.join(FACTORS.values())} must both be there")
        read.seen.update(("rope.scaling.type", "rope.scaling.factor"))
        config["rope_scaling"] = {"type": "longrope", "original_max_position_embeddings": original}
        magnitude = read.get("rope.scaling.attn_factor", float, 0.0)
        if magnitude:
            config["rope_scaling"]["attention_factor"] = magnitude
    else:
        rope_scaling(read, config)


def _olmo2(read: Reader, config: dict[str, Any]) -> None:
    width = head_dim(read, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    config["attention_bias"] = bias_switch(read, config, ATTENTION)
    rope_scaling(read, config)


def _starcoder2(read: Reader, config: dict[str, Any]) -> None:
    width = head_dim(read, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    config["use_bias"] = bias_switch(read, config, (*ATTENTION, "ffn_up", "ffn_down"))
    rope_scaling(read, config)


def _llama_biases(read: Reader, config: dict[str, Any]) -> None:
    config["attention_bias"] = bias_switch(read, config, ATTENTION)
    config["mlp_bias"] = bias_switch(read, config, FEED_FORWARD)
    rope_scaling(read, config)


def _granite(read: Reader, config: dict[str, Any]) -> None:
    """A multiplier that is absent or 0 does nothing; the softmax scale is then that of the head's width."""
    if not read.get("rope.scaling.finetuned", bool, True):
        # llama.cpp takes this key as the switch of this architecture's rotary positions.
        raise read.error("rope.scaling.finetuned is false: layers that do not rotate are not supported")
    width = head_dim(read, config)
    config["attention_multiplier"] = read.get("attention.scale", float, 0.0) or width**-0.5
    config["embedding_multiplier"] = read.get("embedding_scale", float, 0.0) or 1.0
    config["residual_multiplier"] = read.get("residual_scale", float, 0.0) or 1.0
    config["logits_scaling"] = read.get("logit_scale", float, 0.0) or 1.0
    if width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    _llama_biases(read, config)


def _smollm3(read: Reader, config: dict[str, Any]) -> None:
    width = head_dim(read, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    _llama_biases(read, config)


DENSE: Mapping[str, Architecture] = {
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        GROUPED + ROPE,
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        _gemma2,
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", GROUPED + ROPE, {"hidden_act": "silu"}, _phi3),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", GROUPED + ROPE, {"hidden_act": "silu"}, _olmo2),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        (
            *SIZES,
            Row("attention.head_count_kv", "num_key_value_heads", int, "=num_attention_heads"),
            Row("attention.layer_norm_epsilon", "norm_epsilon", float),
            *ROPE,
        ),
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        _starcoder2,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", GROUPED + ROPE, {"hidden_act": "silu"}, _granite),
    "smollm3": Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        GROUPED + ROPE,
        {"hidden_act": "silu", "use_sliding_window": False, "no_rope_layer_interval": 4},
        _smollm3,
    ),
}
