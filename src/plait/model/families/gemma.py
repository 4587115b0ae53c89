"""Gemma: weights 1 + w, scaled embeddings; 2 and 3 (text) norm both sides of each branch and have windows.

Gemma 2 soft-caps its attention; Gemma 3 norms q and k instead and has a rotary table of its own for windowed layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.errors import ConfigError
from plait.model.config import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
    RotaryUse,
)
from plait.model.families import register
from plait.model.families.llama import (
    activation,
    each_attention,
    each_layer,
    given_head_width,
    pre_norm_decoder,
    require_window,
    sizes,
    special_tokens,
)
from plait.model.name_map import NameMap, paired
from plait.model.reader import ConfigReader

_KINDS = ("full_attention", "sliding_attention")
_LAYER = "model.layers.{i}"
NAMES = NameMap(
    rules=(
        *paired(f"{_LAYER}.pre_feedforward_layernorm", f"{_LAYER}.post_attention_layernorm"),
        *paired(f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.post_self_attn_layernorm"),
        *paired(f"{_LAYER}.post_feedforward_layernorm", f"{_LAYER}.post_mlp_layernorm"),
    ),
    skip=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
    prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
)


def rope_blocks(read: ConfigReader) -> tuple[dict, dict]:
    """(full, sliding) rope parameters: `rope_parameters` by layer type; `rope_scaling` adds to the full layers' own."""
    block, scaling = read.mapping("rope_parameters"), read.mapping("rope_scaling")
    if block and not block.keys() & set(_KINDS):
        # transformers would leave such a block unused.
        raise ConfigError(f"rope_parameters of a {read.model_type} must be keyed by layer type ({', '.join(_KINDS)})")
    extra = sorted(block.keys() - set(_KINDS))
    if extra:
        raise ConfigError(f"rope_parameters mixes layer types with the key {extra[0]!r}")
    if scaling.keys() & set(_KINDS):
        raise ConfigError(f"rope_scaling of a {read.model_type} concerns full layers; name it rope_parameters")
    full, sliding = ({} if block.get(kind) is None else block[kind] for kind in _KINDS)
    for kind, value in zip(_KINDS, (full, sliding), strict=True):
        if not isinstance(value, Mapping):
            raise ConfigError(f"rope_parameters.{kind}={value!r} in config.json must be an object")
    return {**full, **scaling}, dict(sliding)


def _causal(read: ConfigReader) -> None:
    if read.flag("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention=true (an embedding model) is not supported")


def _head_width(read: ConfigReader, hidden_size: int, heads: int) -> int:
    return given_head_width(read, hidden_size, heads) if "head_dim" in read.raw else read.integer("head_dim")


@register("gemma", architecture="GemmaForCausalLM")
def gemma(read: ConfigReader) -> ModelConfig:
    d, heads, _ = sizes(read)
    _causal(read)
    bias = read.flag("attention_bias")
    config = pre_norm_decoder(
        read,
        head_width=_head_width(read, d, heads),
        kv_heads=read.integer("num_key_value_heads", heads),
        qkv_bias=bias,
        o_bias=bias,
        norm=NormSpec(eps=read.number("rms_norm_eps"), unit_offset=True, fp32_weight=True),
    )
    if read("hidden_act") == "gelu":  # its first configurations say so and mean the approximation by tanh
        config = each_layer(
            config, lambda layer: replace(layer, feed_forward=replace(layer.feed_forward, activation="gelu_tanh"))
        )
    return replace(config, embedding_scale=float(d) ** 0.5, round_embedding_scale=True, fp16_overflows=True)


@register("gemma2", replace(NAMES, skip=(), prefixes=()), architecture="Gemma2ForCausalLM")
def gemma2(read: ConfigReader) -> ModelConfig:
    d, heads, num_layers = sizes(read)
    _causal(read)
    width = _head_width(read, d, heads)
    window = read.integer("sliding_window", 0)
    types = read.layer_types(num_layers) or ["sliding_attention", "full_attention"] * num_layers
    require_window(window, types[:num_layers])
    norm = NormSpec(eps=read.number("rms_norm_eps"), unit_offset=True, fp32_weight=True)
    bias = read.flag("attention_bias")
    config = pre_norm_decoder(
        read,
        windows=[window if kind == "sliding_attention" else 0 for kind in types[:num_layers]],
        head_width=width,
        kv_heads=read.integer("num_key_value_heads", heads),
        qkv_bias=bias,
        o_bias=bias,
        norm=norm,
        act="hidden_activation",
    )
    config = each_attention(
        config,
        scale=read.positive("query_pre_attn_scalar") ** -0.5,
        soft_cap=read.number("attn_logit_softcapping", 0.0, low=0.0),
    )
    config = each_layer(config, lambda layer: replace(layer, post_attention_norm=norm, post_feed_forward_norm=norm))
    return replace(
        config,
        embedding_scale=float(d) ** 0.5,
        round_embedding_scale=True,
        logit_soft_cap=read.number("final_logit_softcapping", 0.0, low=0.0),
        fp16_overflows=True,
    )


@register(
    "gemma3_text",
    NAMES,
    architecture="Gemma3ForCausalLM",
    proved_on="random weights; Gemma 3 270M (GGUF)",
)
def gemma3_text(read: ConfigReader) -> ModelConfig:
    d, heads, num_layers = sizes(read)
    _causal(read)
    width = _head_width(read, d, heads)
    kv = read.integer("num_key_value_heads", heads)
    max_positions = read.integer("max_position_embeddings")
    window = read.integer("sliding_window", 0)
    pattern = read.given("sliding_window_pattern", read.given("_sliding_window_pattern", 6))
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise ConfigError(f"sliding_window_pattern={pattern!r} must be a whole number of at least 1")
    types = read.layer_types(num_layers) or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)
    ]
    require_window(window, types)
    full, sliding = rope_blocks(read)
    tables = (
        read.rotary(width, full, read.given("rope_theta", 1_000_000.0), max_positions),
        read.rotary(width, sliding, read.given("rope_local_base_freq", 10_000.0), max_positions),
    )
    # The class of the transformers library reads this key and never applies it, and so does its original.
    read("attn_logit_softcapping")
    norm = NormSpec(eps=read.number("rms_norm_eps"), unit_offset=True, fp32_weight=True)
    bias = read.flag("attention_bias")
    scale = read.positive("query_pre_attn_scalar") ** -0.5

    def layer(kind: str) -> LayerSpec:
        windowed = kind == "sliding_attention"
        table = 1 if windowed else 0
        attention = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv,
            key_width=width,
            value_width=width,
            scale=scale,
            q_bias=bias,
            k_bias=bias,
            v_bias=bias,
            o_bias=bias,
            head_norm=norm,
            window=window if windowed else 0,
            rotary=RotaryUse(table, tables[table].width),
        )
        return LayerSpec(attention, mlp, norm, norm, norm, norm)

    mlp = FeedForwardSpec(read.integer("intermediate_size"), activation(read, "hidden_activation"))
    return ModelConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=d,
        layers=tuple(layer(kind) for kind in types),
        rotary=tables,
        final_norm=norm,
        tie_embeddings=read.flag("tie_word_embeddings"),
        max_positions=max_positions,
        embedding_scale=float(d) ** 0.5,
        round_embedding_scale=True,
        logit_soft_cap=read.number("final_logit_softcapping", 0.0, low=0.0),
        attention_dropout=read.dropout("attention_dropout"),
        fp16_overflows=True,
        **special_tokens(read),
    )
