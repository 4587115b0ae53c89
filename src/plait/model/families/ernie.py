"""ERNIE 4.5 with experts: softmax scores, a bias of the selection, shared experts, some layers dense."""

from __future__ import annotations

from dataclasses import replace

from plait.errors import ConfigError
from plait.model.config import FeedForwardSpec, MixtureSpec, ModelConfig
from plait.model.families import register
from plait.model.families.llama import activation, pre_norm_decoder
from plait.model.families.mixture import PER_EXPERT, with_mixtures
from plait.model.name_map import NameMap, Rule
from plait.model.reader import ConfigReader
from plait.ops.spec import RouterSpec

_MLP = "model.layers.{i}.mlp"
_BIAS = "e_score_correction_bias"
NAMES = NameMap(
    rules=(
        *PER_EXPERT.rules,
        Rule(f"{_MLP}.moe_statics.{_BIAS}", (f"{_MLP}.gate.{_BIAS}",), one_row=True),
        Rule(f"{_MLP}.gate.moe_statics.{_BIAS}", (f"{_MLP}.gate.{_BIAS}",), one_row=True, read_only=True),
    ),
    skip=(r"(model\.)?mtp_.*",),  # layers that predict further tokens
)


@register("ernie4_5_moe", NAMES, architecture="Ernie4_5_MoeForCausalLM")
def ernie4_5_moe(read: ConfigReader) -> ModelConfig:
    bias = read.flag("use_bias")
    config = pre_norm_decoder(
        read,
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        theta=500_000.0,
        pairing="adjacent",
        rotary_fp32="tables",
    )
    chosen = RouterSpec(
        read.integer("moe_num_experts"),
        read.integer("moe_k"),
        renormalise="always",
        least_sum=read.number("moe_norm_min", low=0.0),
    )
    act, width, shared = activation(read), read.integer("moe_intermediate_size"), read.integer("moe_num_shared_experts")
    if shared < 0:
        raise ConfigError(f"moe_num_shared_experts={shared} must not be negative")
    mixture = MixtureSpec(
        chosen,
        width,
        act,
        selection_bias=True,
        shared=FeedForwardSpec(width * shared, act, up_bias=bias, down_bias=bias) if shared else None,
    )
    return with_mixtures(replace(config, head_bias=bias), mixture, _sparse_layers(read, len(config.layers)))


def _sparse_layers(read: ConfigReader, num_layers: int) -> list[bool]:
    """Every `moe_layer_interval`-th layer from the start index to the end index; an end of -1 is the last layer."""
    first, last, step = (read.integer(f"moe_layer_{name}") for name in ("start_index", "end_index", "interval"))
    if step < 1:
        raise ConfigError(f"moe_layer_interval={step} must be at least 1")
    last = num_layers - 1 if last == -1 else last
    return [first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)]
