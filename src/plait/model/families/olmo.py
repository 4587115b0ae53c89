"""OLMo (norms without parameters), OLMo 2 (norms after each branch, q and k normed whole) and OLMo 3 (windows)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.model.config import ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.gemma import rope_blocks
from plait.model.families.llama import each_attention, each_layer, pre_norm_decoder, require_window
from plait.model.name_map import NameMap, paired
from plait.model.reader import ConfigReader

_LAYER = "model.layers.{i}"
POST_NORM_NAMES = NameMap(
    rules=(
        *paired(f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.post_self_attn_layernorm"),
        *paired(f"{_LAYER}.post_feedforward_layernorm", f"{_LAYER}.post_mlp_layernorm"),
    )
)


def norms_after(config: ModelConfig, norm: NormSpec) -> ModelConfig:
    """The configuration with its norms after each branch instead of before it."""
    return each_layer(
        config,
        lambda layer: replace(
            layer,
            pre_attention_norm=None,
            pre_feed_forward_norm=None,
            post_attention_norm=norm,
            post_feed_forward_norm=norm,
        ),
    )


@register("olmo", architecture="OlmoForCausalLM")
def olmo(read: ConfigReader) -> ModelConfig:
    bias = read.flag("attention_bias")
    norm = NormSpec("layer", 1e-5, weight=False)
    config = pre_norm_decoder(read, qkv_bias=bias, o_bias=bias, norm=norm, rotary_fp32="tables")
    return each_attention(config, clip=0.0 if read("clip_qkv") is None else read.positive("clip_qkv"))


def _post_norm(
    read: ConfigReader,
    windows: list[int] | None = None,
    theta: float = 10_000.0,
    rope: Mapping[str, Any] | None = None,
) -> ModelConfig:
    bias = read.flag("attention_bias")
    norm = NormSpec(eps=read.number("rms_norm_eps"), fp32_weight=True)
    config = pre_norm_decoder(
        read,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        head_norm=norm,
        norm=norm,
        theta=theta,
        rope=rope,
        rotary_fp32="tables",
    )
    return norms_after(each_attention(config, head_norm_over="projection"), norm)


@register("olmo2", POST_NORM_NAMES, architecture="Olmo2ForCausalLM")
def olmo2(read: ConfigReader) -> ModelConfig:
    return _post_norm(read)


_OLMO3_THETA = 500_000.0


@register("olmo3", POST_NORM_NAMES, architecture="Olmo3ForCausalLM")
def olmo3(read: ConfigReader) -> ModelConfig:
    num_layers = read.num_layers()
    window = read.integer("sliding_window", 0)
    types = read.layer_types(num_layers) or [
        "sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers)
    ]
    require_window(window, types)
    full, sliding = rope_blocks(read)
    windowed = [kind == "sliding_attention" for kind in types]
    config = _post_norm(read, [window if w else 0 for w in windowed], _OLMO3_THETA, rope=full)
    # A theta beside the blocks is that of full layers only, and so is a scaling.
    head = config.layers[0].attention.key_width
    tables = (*config.rotary, read.rotary(head, sliding, _OLMO3_THETA, config.max_positions))

    def table(index: int) -> int:
        return 1 if windowed[index] else 0

    layers = []
    for index, layer in enumerate(config.layers):
        attention = layer.attention
        assert attention.rotary is not None
        rotary = replace(attention.rotary, table=table(index))
        layers.append(replace(layer, attention=replace(attention, rotary=rotary)))
    return replace(config, layers=tuple(layers), rotary=tables)
