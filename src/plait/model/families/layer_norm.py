"""StarCoder2, StableLM and Nemotron: LayerNorm with a bias, otherwise shaped like Llama."""

from __future__ import annotations

from dataclasses import replace

from plait.model.config import ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.llama import (
    exact_head_width,
    one_norm_for_both,
    pre_norm_decoder,
    same_window_everywhere,
    sizes,
)
from plait.model.name_map import NameMap, paired
from plait.model.reader import ConfigReader

_LAYER = "model.layers.{i}"
_BOTH = ("weight", "bias")
STARCODER2_NAMES = NameMap(
    rules=(
        *paired(f"{_LAYER}.mlp.c_fc", f"{_LAYER}.mlp.up_proj", _BOTH),
        *paired(f"{_LAYER}.mlp.c_proj", f"{_LAYER}.mlp.down_proj", _BOTH),
    )
)


@register("starcoder2", STARCODER2_NAMES, architecture="Starcoder2ForCausalLM")
def starcoder2(read: ConfigReader) -> ModelConfig:
    bias = read.flag("use_bias")
    config = pre_norm_decoder(
        read,
        windows=same_window_everywhere(read),
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm=NormSpec("layer", read.number("norm_epsilon"), bias=True),
        gated=False,
    )
    return replace(
        config,
        embedding_dropout=read.dropout("embedding_dropout"),
        hidden_dropout=read.dropout("residual_dropout"),
    )


@register("stablelm", architecture="StableLmForCausalLM")
def stablelm(read: ConfigReader) -> ModelConfig:
    d, heads, _ = sizes(read)
    config = pre_norm_decoder(
        read,
        head_width=exact_head_width(d, heads),
        kv_heads=read.integer("num_key_value_heads", heads),
        qkv_bias=read.flag("use_qkv_bias"),
        norm=NormSpec("layer", read.number("layer_norm_eps"), bias=True),
        partial=0.25,
    )
    if read.flag("use_parallel_residual"):
        config = one_norm_for_both(config, residual_first=True)
    return replace(config, hidden_dropout=read.dropout("hidden_dropout"))


@register("nemotron", architecture="NemotronForCausalLM")
def nemotron(read: ConfigReader) -> ModelConfig:
    """A plain feed-forward; the norms' stored weights are w of 1 + w."""
    bias = read.flag("attention_bias")
    return pre_norm_decoder(
        read,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read.flag("mlp_bias"),
        norm=NormSpec("layer", read.number("norm_eps"), bias=True, unit_offset=True),
        partial=0.5,
        gated=False,
    )
