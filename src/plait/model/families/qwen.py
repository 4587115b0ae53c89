"""Qwen2 (biases on q, k, v) and Qwen3 (a norm per head on q and k)."""

from __future__ import annotations

from plait.errors import ConfigError
from plait.model.config import ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.llama import pre_norm_decoder, require_window
from plait.model.families.llama_like import width_or_default
from plait.model.reader import ConfigReader


def upper_windows(read: ConfigReader) -> list[int]:
    """Window per layer: `layer_types` decides; else layers from `max_window_layers` upward, when windows are in use."""
    num_layers = read.num_layers()
    window = read.integer("sliding_window", 0)
    if window < 0:
        raise ConfigError(f"sliding_window={window} must not be negative")
    if not read.flag("use_sliding_window"):
        window = 0
    first = read.integer("max_window_layers")
    types = read.layer_types(num_layers)
    if types is not None:
        require_window(window, types)
        return [window if kind == "sliding_attention" else 0 for kind in types]
    return [window if i >= first else 0 for i in range(num_layers)]


@register("qwen2", architecture="Qwen2ForCausalLM")
def qwen2(read: ConfigReader) -> ModelConfig:
    return pre_norm_decoder(read, windows=upper_windows(read), qkv_bias=True)


@register("qwen3", architecture="Qwen3ForCausalLM")
def qwen3(read: ConfigReader) -> ModelConfig:
    bias = read.flag("attention_bias")
    return pre_norm_decoder(
        read,
        windows=upper_windows(read),
        head_width=width_or_default(read),
        qkv_bias=bias,
        o_bias=bias,
        head_norm=NormSpec(eps=read.number("rms_norm_eps")),
    )
