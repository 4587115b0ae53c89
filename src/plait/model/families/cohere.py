"""Command R (cohere) and its windowed successor (cohere2): one LayerNorm for two parallel branches, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from plait.errors import ConfigError
from plait.model.config import ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.llama import (
    each_attention,
    exact_head_width,
    one_norm_for_both,
    pre_norm_decoder,
    require_window,
    sizes,
    with_attention,
)
from plait.model.reader import ConfigReader


def _parallel(read: ConfigReader, norm: NormSpec, theta: float, head_width: int | None = None) -> ModelConfig:
    bias = read.flag("attention_bias")
    config = pre_norm_decoder(
        read,
        qkv_bias=bias,
        o_bias=bias,
        norm=norm,
        theta=theta,
        pairing="adjacent",
        rotary_fp32="products",
        head_width=head_width,
    )
    config = one_norm_for_both(config, residual_first=True)
    return replace(config, logit_scale=read.number("logit_scale"))


@register("cohere", architecture="CohereForCausalLM")
def cohere(read: ConfigReader) -> ModelConfig:
    norm = NormSpec("layer", read.number("layer_norm_eps"))
    config = _parallel(read, norm, 500_000.0)
    if read.flag("use_qk_norm"):
        config = each_attention(config, head_norm=norm, head_norm_over="own_head")
    return config


@register("cohere2", architecture="Cohere2ForCausalLM")
def cohere2(read: ConfigReader) -> ModelConfig:
    """Three windowed layers of four; the full ones do not rotate."""
    d, heads, num_layers = sizes(read)
    width = exact_head_width(d, heads)
    if read.optional_integer("head_dim", width) != width:
        raise ConfigError(f"head_dim={read.raw['head_dim']} must be hidden_size / num_attention_heads, {width}")
    window = read.integer("sliding_window", 0)
    pattern = read.given("sliding_window_pattern", 4)
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise ConfigError(f"sliding_window_pattern={pattern!r} must be a whole number of at least 1")
    types = read.layer_types(num_layers) or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)
    ]
    require_window(window, types)
    config = _parallel(read, NormSpec("layer", read.number("layer_norm_eps")), 10_000.0, width)
    layers = (
        with_attention(layer, window=window) if kind == "sliding_attention" else with_attention(layer, rotary=None)
        for layer, kind in zip(config.layers, types, strict=True)
    )
    return replace(config, layers=tuple(layers))
