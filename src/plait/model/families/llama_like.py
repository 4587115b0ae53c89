"""Families that are Llama with a few switches set otherwise, one short function each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plait.errors import ConfigError
from plait.model.config import LayerSpec, ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.llama import each_attention, each_layer, pre_norm_decoder, require_window, with_attention
from plait.model.families.olmo import POST_NORM_NAMES, norms_after
from plait.model.name_map import NameMap, paired
from plait.model.reader import ConfigReader

_LAYER = "model.layers.{i}"


@register("granite", architecture="GraniteForCausalLM")
def granite(read: ConfigReader) -> ModelConfig:
    bias = read.flag("attention_bias")
    return with_multipliers(read, pre_norm_decoder(read, qkv_bias=bias, o_bias=bias, mlp_bias=read.flag("mlp_bias")))


def with_multipliers(read: ConfigReader, config: ModelConfig) -> ModelConfig:
    """Granite's four: of embeddings, scores, branches and (a divisor) logits."""
    config = each_attention(config, scale=read.number("attention_multiplier"))
    branch_scale = read.number("residual_multiplier")
    config = each_layer(config, lambda layer: replace(layer, branch_scale=branch_scale))
    return replace(
        config,
        embedding_scale=read.number("embedding_multiplier"),
        logit_scale=1.0 / read.positive("logits_scaling"),
    )


@register("smollm3", architecture="SmolLM3ForCausalLM")
def smollm3(read: ConfigReader) -> ModelConfig:
    """Every fourth layer does not rotate; windows, where they are in use, are on those."""
    num_layers = read.num_layers()
    every = read.integer("no_rope_layer_interval")
    if every < 1:
        raise ConfigError(f"no_rope_layer_interval={every} must be at least 1")
    rotates = read.given("no_rope_layers", [int((i + 1) % every != 0) for i in range(num_layers)])
    if not isinstance(rotates, list) or len(rotates) < num_layers or set(rotates) - {0, 1}:
        raise ConfigError(f"no_rope_layers must hold a 0 or a 1 for each of the {num_layers} layers")
    window = read.integer("sliding_window", 0) if read.flag("use_sliding_window") else 0
    read("sliding_window")
    types = read.layer_types(num_layers) or [
        "sliding_attention" if window and not rotates[i] else "full_attention" for i in range(num_layers)
    ]
    require_window(window, types)
    windows = [window if kind == "sliding_attention" else 0 for kind in types]
    bias = read.flag("attention_bias")
    config = pre_norm_decoder(
        read, windows=windows, qkv_bias=bias, o_bias=bias, mlp_bias=read.flag("mlp_bias"), theta=2_000_000.0
    )
    return replace(
        config,
        layers=tuple(
            layer if rotates[i] else with_attention(layer, rotary=None) for i, layer in enumerate(config.layers)
        ),
    )


@register("seed_oss", architecture="SeedOssForCausalLM")
def seed_oss(read: ConfigReader) -> ModelConfig:
    config = pre_norm_decoder(
        read,
        qkv_bias=read.flag("attention_bias"),
        o_bias=read.flag("attention_out_bias"),
        mlp_bias=read.flag("mlp_bias"),
        head_width=width_or_default(read),
        kv_heads=kv_heads_or_default(read),
    )
    return replace(config, hidden_dropout=read.dropout("residual_dropout"))


@register("ernie4_5", architecture="Ernie4_5ForCausalLM")
def ernie4_5(read: ConfigReader) -> ModelConfig:
    bias = read.flag("use_bias")
    return pre_norm_decoder(
        read,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        head_width=width_or_default(read),
        kv_heads=kv_heads_or_default(read),
        theta=500_000.0,
        pairing="adjacent",
        rotary_fp32="tables",
    )


@register("helium", architecture="HeliumForCausalLM")
def helium(read: ConfigReader) -> ModelConfig:
    norm = NormSpec(eps=read.number("rms_norm_eps"), fp32_weight=True)
    config = pre_norm_decoder(
        read,
        qkv_bias=read.flag("attention_bias"),
        mlp_bias=read.flag("mlp_bias"),
        head_width=width_or_default(read),
        kv_heads=kv_heads_or_default(read),
        norm=norm,
        theta=100_000.0,
        pairing="adjacent",
    )
    attention = config.layers[0].attention
    if attention.num_heads * attention.key_width != config.hidden_size:
        raise ConfigError(
            f"num_attention_heads={attention.num_heads} times head_dim={attention.key_width} must be"
            f" hidden_size={config.hidden_size}: helium's output projection is square"
        )
    return config


@register("arcee", architecture="ArceeForCausalLM")
def arcee(read: ConfigReader) -> ModelConfig:
    """A plain feed-forward."""
    bias = read.flag("attention_bias")
    return pre_norm_decoder(read, qkv_bias=bias, o_bias=bias, mlp_bias=read.flag("mlp_bias"), gated=False)


HUNYUAN_NAMES = NameMap(
    rules=(
        *paired(f"{_LAYER}.self_attn.query_layernorm", f"{_LAYER}.self_attn.q_norm"),
        *paired(f"{_LAYER}.self_attn.key_layernorm", f"{_LAYER}.self_attn.k_norm"),
    )
)


@register("hunyuan_v1_dense", HUNYUAN_NAMES, architecture="HunYuanDenseV1ForCausalLM")
def hunyuan_v1_dense(read: ConfigReader) -> ModelConfig:
    """q and k are normed after they are rotated."""
    bias = read.flag("attention_bias")
    read("eod_token_id")
    norm = NormSpec(eps=read.number("rms_norm_eps"))
    config = pre_norm_decoder(read, qkv_bias=bias, o_bias=bias, head_norm=norm, rope=_hunyuan_rope(read))
    return each_attention(config, head_norm_after_rotary=True)


def _hunyuan_rope(read: ConfigReader) -> dict[str, Any]:
    """The rope block. A `dynamic` one with an alpha is a fixed base, whose other keys nobody reads."""
    block = read.rope_block()
    if block.get("rope_type", block.get("type")) == "dynamic" and block.get("alpha"):
        kept: dict[str, Any] = {key: block[key] for key in ("alpha", "rope_theta") if key in block}
        return {**kept, "rope_type": "ntk_alpha"}
    return block


@register("exaone4", POST_NORM_NAMES, architecture="Exaone4ForCausalLM")
def exaone4(read: ConfigReader) -> ModelConfig:
    """Norms after each branch; where there is a window, the full layers do not rotate."""
    num_layers = read.num_layers()
    window = read.integer("sliding_window", 0)
    windowed = read("sliding_window") is not None  # a window of 0 is none, and keeps full layers from rotating
    types = read.layer_types(num_layers)
    read("sliding_window_pattern")  # published models give it as text, "LLLG", or null beside layer_types, which decide
    if types is None:
        types = _every_last_full(read, num_layers) if windowed else ["full_attention"] * num_layers
    require_window(window, types)
    norm = NormSpec(eps=read.number("rms_norm_eps"))
    kv = kv_heads_or_default(read)
    config = norms_after(pre_norm_decoder(read, kv_heads=kv, head_norm=norm, norm=norm), norm)

    def layer(spec: LayerSpec, kind: str) -> LayerSpec:
        if kind == "sliding_attention":
            return with_attention(spec, window=window)
        return with_attention(spec, rotary=None) if windowed else spec

    return replace(config, layers=tuple(layer(s, kind) for s, kind in zip(config.layers, types, strict=True)))


def _every_last_full(read: ConfigReader, num_layers: int) -> list[str]:
    """Windowed layers but for every `sliding_window_pattern`-th."""
    pattern = read.integer("sliding_window_pattern", 0)
    if pattern < 1:
        raise ConfigError(f"sliding_window_pattern={pattern} must be at least 1")
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]


def width_or_default(read: ConfigReader) -> int | None:
    """`head_dim` of a class with a default of its own: absent is that default, null is hidden / heads."""
    return None if "head_dim" in read.raw and read.raw["head_dim"] is None else _at_least_one(read, "head_dim")


def kv_heads_or_default(read: ConfigReader) -> int:
    """`num_key_value_heads` of a class with a default of its own: absent is that default, null is the heads."""
    key = "num_key_value_heads"
    return read.integer(key, read.integer("num_attention_heads"))


def _at_least_one(read: ConfigReader, key: str) -> int:
    value = read.integer(key)
    if value < 1:
        raise ConfigError(f"{key}={value} must be at least 1")
    return value
