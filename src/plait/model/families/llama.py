"""Llama and Mistral: RMS norms before each branch, rotary positions, gated feed-forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
from plait.model.reader import ConfigReader
from plait.ops.spec import Pairing, RotaryFp32

log = logging.getLogger("plait.config")


def activation(read: ConfigReader, key: str = "hidden_act") -> str:
    """The feed-forward's activation, by the names that the operations know."""
    name = read(key)
    known = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu_squared",
        "xielu": "xielu",
    }
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{key}={name!r} is not supported (supported: {', '.join(sorted(known))})")
    return known[name]


def pre_norm_decoder(
    read: ConfigReader,
    *,
    windows: list[int] | None = None,
    head_width: int | None = None,
    kv_heads: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    head_norm: NormSpec | None = None,
    norm: NormSpec | None = None,
    theta: float = 10_000.0,
    partial: float | None = None,
    pairing: Pairing = "halves",
    rotary_fp32: RotaryFp32 = "nothing",
    gated: bool = True,
    act: str = "hidden_act",
    rope: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The shape that Llama, Mistral, Qwen2 and Qwen3 share; what differs is passed in.

    windows: per layer, default all full. head_width, kv_heads: where the family's own default differs from hidden /
    heads and the key's value. norm: default RMS with `rms_norm_eps`. theta, partial: where the configuration says
    nothing of them; partial None: the family rotates whole heads. act: the key of the activation. rope: default what
    the configuration gives for all layers.
    """
    d, heads, num_layers = sizes(read)
    width = given_head_width(read, d, heads) if head_width is None else head_width
    if width < 1:
        raise ConfigError(f"head_dim={width} must be at least 1")
    if kv_heads is None:
        kv_heads = read.optional_integer("num_key_value_heads")
    max_positions = read.integer("max_position_embeddings")
    if partial is not None:
        partial = read.given("partial_rotary_factor", partial)
    rotary = read.rotary(
        width, read.rope_block() if rope is None else rope, read.given("rope_theta", theta), max_positions, partial
    )
    if norm is None:
        norm = NormSpec(eps=read.number("rms_norm_eps"))
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        key_width=width,
        value_width=width,
        scale=width**-0.5,
        q_bias=qkv_bias,
        k_bias=qkv_bias,
        v_bias=qkv_bias,
        o_bias=o_bias,
        head_norm=head_norm,
        rotary=RotaryUse(0, rotary.width, pairing, rotary_fp32),
    )
    mlp = FeedForwardSpec(read.integer("intermediate_size"), activation(read, act), gated, mlp_bias, mlp_bias)
    return ModelConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=d,
        layers=tuple(LayerSpec(with_window(attention, w), mlp, norm, norm) for w in (windows or [0] * num_layers)),
        rotary=(rotary,),
        final_norm=norm,
        tie_embeddings=read.flag("tie_word_embeddings"),
        max_positions=max_positions,
        attention_dropout=read.dropout("attention_dropout"),
        **special_tokens(read),
    )


def sizes(
    read: ConfigReader,
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    layers: str = "num_hidden_layers",
) -> tuple[int, int, int]:
    """(hidden size, attention heads, layers), each at least 1; by the family's own names of the keys."""
    d, h = read.integer(hidden), read.integer(heads)
    if min(d, h) < 1:
        raise ConfigError(f"{hidden}={d} and {heads}={h} must be at least 1")
    return d, h, read.num_layers(layers)


def given_head_width(read: ConfigReader, hidden_size: int, heads: int) -> int:
    """`head_dim`, or hidden / heads where it is absent or null."""
    width = read.optional_integer("head_dim")
    if width is None:
        return exact_head_width(hidden_size, heads)
    if width < 1:
        raise ConfigError(f"head_dim={width} must be at least 1")
    return width


def exact_head_width(hidden_size: int, heads: int) -> int:
    """hidden / heads, which must be whole when no head_dim is given."""
    if hidden_size % heads:
        raise ConfigError(
            f"hidden_size={hidden_size} is no multiple of num_attention_heads={heads}, and no head_dim is given"
        )
    return hidden_size // heads


def with_window(attention: AttentionSpec, window: int) -> AttentionSpec:
    return replace(attention, window=window) if window else attention


def each_layer(config: ModelConfig, change: Callable[[LayerSpec], LayerSpec]) -> ModelConfig:
    """The configuration with every layer changed."""
    return replace(config, layers=tuple(change(layer) for layer in config.layers))


def each_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The configuration with these fields of every layer's attention changed."""
    return each_layer(config, lambda layer: with_attention(layer, **changes))


def with_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """The layer with these fields of its attention changed."""
    return replace(layer, attention=replace(layer.attention, **changes))


def one_norm_for_both(config: ModelConfig, residual_first: bool = False) -> ModelConfig:
    """The configuration with parallel branches that read the same norm."""

    def change(layer: LayerSpec) -> LayerSpec:
        return replace(
            layer, parallel=True, shared_norm=True, pre_feed_forward_norm=None, residual_first=residual_first
        )

    return each_layer(config, change)


def not_negative(read: ConfigReader, key: str) -> int:
    """A whole number of at least 0; absent or null is the class's default, else 0."""
    value = read.integer(key, 0)
    if value < 0:
        raise ConfigError(f"{key}={value} must not be negative")
    return value


def same_window_everywhere(read: ConfigReader, used: bool = True) -> list[int]:
    """`sliding_window` on every layer, where windows are used. `layer_types` may only say the same.

    For families whose class in the transformers library builds one mask for all layers and ignores the list.
    """
    num_layers = read.num_layers()
    window = not_negative(read, "sliding_window") * used
    types = read.layer_types(num_layers)
    expected = "sliding_attention" if window else "full_attention"
    if types is not None and set(types) != {expected}:
        raise ConfigError(
            f"layer_types of a {read.model_type} must all be {expected!r} here: its layers share one mask"
        )
    return [window] * num_layers


def require_window(window: int, layer_types: list[str]) -> None:
    """Refuse windowed layers of a model that names no window."""
    if not window and "sliding_attention" in layer_types:
        raise ConfigError("layer_types has sliding_attention, but sliding_window is absent, 0 or switched off")


def special_tokens(read: ConfigReader) -> dict:
    """The keyword arguments of `ModelConfig` that name special tokens."""
    eos, vocab_size = read.token_ids("eos_token_id"), read.integer("vocab_size")
    beyond = [i for i in eos if i >= vocab_size]
    if beyond:
        log.warning("eos_token_id=%d is beyond vocab_size=%d: it never ends a sequence", beyond[0], vocab_size)
    # Some llama configurations write -1 for "there is none".
    pad = None if read("pad_token_id") == -1 else read.token_id("pad_token_id")
    return {"eos_token_ids": eos, "bos_token_id": read.token_id("bos_token_id"), "pad_token_id": pad}


@register("llama", architecture="LlamaForCausalLM", proved_on="random weights; SmolLM2-135M-Instruct (GGUF)")
def llama(read: ConfigReader) -> ModelConfig:
    bias = read.flag("attention_bias")
    return pre_norm_decoder(read, qkv_bias=bias, o_bias=bias, mlp_bias=read.flag("mlp_bias"))


@register("mistral", architecture="MistralForCausalLM")
def mistral(read: ConfigReader) -> ModelConfig:
    # Absent is the class's own default, which need not be the number of heads; null is the number of heads.
    kv = read.integer("num_key_value_heads", read.integer("num_attention_heads"))
    return pre_norm_decoder(read, windows=same_window_everywhere(read), kv_heads=kv)
