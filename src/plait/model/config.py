"""What a model is: switches per model and per layer. One `Decoder` is built from this and nothing else.

A family (plait.model.families) turns a config.json dictionary into a `ModelConfig`. No torch here, so
that `plait models` and `plait inspect` answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.errors import ConfigError
from plait.ops.spec import AttendSpec, LayerCache, Pairing


@dataclass(frozen=True)
class NormSpec:
    """A normalisation.

    kind: "rms" or "layer". weight, bias: whether these parameters exist. unit_offset: the stored weight is
    w of a multiplication by 1 + w (Gemma). fp32_weight: the product with the weight stays in fp32 and is cast
    afterwards (Gemma), instead of casting first (Llama); only matters below fp32.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    weight: bool = True
    bias: bool = False
    unit_offset: bool = False
    fp32_weight: bool = False


@dataclass(frozen=True)
class RotaryUse:
    """How a layer rotates: which of the model's tables, how many leading features of a head, and which pair up."""

    table: int = 0
    width: int = 0
    pairing: Pairing = "halves"


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer. Biases each on their own; None means that the thing is absent."""

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scale: float
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    head_norm: NormSpec | None = None
    window: int = 0
    soft_cap: float = 0.0
    rotary: RotaryUse | None = None

    @property
    def attend(self) -> AttendSpec:
        return AttendSpec(
            self.num_heads,
            self.num_kv_heads,
            self.key_width,
            self.value_width,
            self.scale,
            self.window,
            self.soft_cap,
        )

    @property
    def cache(self) -> LayerCache:
        return LayerCache(self.num_kv_heads, self.key_width, self.value_width, self.window)


@dataclass(frozen=True)
class FeedForwardSpec:
    """Feed-forward of one layer: gated (act(gate x) * up x, then down) or plain (act(up x), then down)."""

    width: int
    activation: str
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer. A norm that is None is absent.

    Sequential: x += post_attention(attention(pre_attention(x))); x += post_feed_forward(ff(pre_feed_forward(x))).
    parallel: both branches read x (each through its own norm) and are added to it once.
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    pre_attention_norm: NormSpec | None
    pre_feed_forward_norm: NormSpec | None
    post_attention_norm: NormSpec | None = None
    post_feed_forward_norm: NormSpec | None = None
    parallel: bool = False


@dataclass(frozen=True)
class RotarySpec:
    """A rotary table before its frequencies are computed (plait.model.rope).

    rope_type: default, linear, llama3, yarn, proportional. width: features of a head that rotate. scaling: the
    type's own keys, as
    in config.json. divisors: per-pair divisors that a GGUF file carries (replaces llama3's own arithmetic).
    """

    rope_type: str
    theta: float
    width: int
    head_width: int
    max_positions: int
    scaling: Mapping[str, Any] = field(default_factory=dict)
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model.

    raw: the config.json dictionary that it came from; it is what `save_pretrained` writes back.
    embedding_scale is rounded to the weights' dtype before use when round_embedding_scale is set (Gemma).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rotary: tuple[RotarySpec, ...]
    final_norm: NormSpec
    tie_embeddings: bool
    max_positions: int
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False
    logit_soft_cap: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    fp16_overflows: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def caches(self) -> list[LayerCache]:
        """What each layer keeps per token, in layer order."""
        return [layer.attention.cache for layer in self.layers]

    def kv_bytes_per_token(self, bytes_per_number: int = 2) -> int:
        """Cache bytes that one more token costs while no window is full."""
        return sum(c.numbers_per_token for c in self.caches()) * bytes_per_number

    def param_counts(self) -> dict[str, int]:
        """Parameters: total (a tied head counted once), active per token, embedding, attention, ffn_total, norms."""
        d = self.hidden_size
        counts = dict.fromkeys(("embedding", "head", "attention", "ffn_total", "norms"), 0)
        counts["embedding"] = self.vocab_size * d
        counts["head"] = 0 if self.tie_embeddings else self.vocab_size * d
        counts["norms"] += _norm_params(self.final_norm, d)
        for layer in self.layers:
            a, f = layer.attention, layer.feed_forward
            q, k, v = a.num_heads * a.key_width, a.num_kv_heads * a.key_width, a.num_kv_heads * a.value_width
            o = a.num_heads * a.value_width
            counts["attention"] += d * (q + k + v + o)
            counts["attention"] += a.q_bias * q + a.k_bias * k + a.v_bias * v + a.o_bias * d
            counts["ffn_total"] += d * f.width * (3 if f.gated else 2)
            counts["ffn_total"] += f.up_bias * f.width * (2 if f.gated else 1) + f.down_bias * d
            for norm in (
                layer.pre_attention_norm,
                layer.pre_feed_forward_norm,
                layer.post_attention_norm,
                layer.post_feed_forward_norm,
            ):
                counts["norms"] += _norm_params(norm, d)
            counts["norms"] += 2 * _norm_params(a.head_norm, a.key_width)
        total = sum(counts.values())
        return {"total": total, "active": total, **counts}


def _norm_params(norm: NormSpec | None, width: int) -> int:
    return 0 if norm is None else width * (norm.weight + norm.bias)


def check(config: ModelConfig) -> ModelConfig:
    """Refuse shapes that no forward could carry out, before any weight is read."""
    if config.vocab_size < 1 or config.hidden_size < 1 or not config.layers:
        raise ConfigError(
            f"vocab_size={config.vocab_size}, hidden_size={config.hidden_size} and"
            f" num_hidden_layers={len(config.layers)} must all be at least 1"
        )
    if config.final_norm.eps < 0:
        raise ConfigError(f"the norms' eps={config.final_norm.eps} must not be negative")
    if config.max_positions < 1:
        raise ConfigError(f"max_position_embeddings={config.max_positions} must be at least 1")
    for index, layer in enumerate(config.layers):
        a, f = layer.attention, layer.feed_forward
        if min(a.num_heads, a.num_kv_heads, a.key_width, a.value_width, f.width) < 1:
            raise ConfigError(
                f"layer {index}: num_attention_heads={a.num_heads}, num_key_value_heads={a.num_kv_heads},"
                f" head_dim={a.key_width} and intermediate_size={f.width} must all be at least 1"
            )
        if a.num_heads % a.num_kv_heads:
            raise ConfigError(
                f"layer {index}: num_attention_heads={a.num_heads} is no multiple of"
                f" num_key_value_heads={a.num_kv_heads}"
            )
        if a.window < 0:
            raise ConfigError(f"layer {index}: sliding_window={a.window} must not be negative")
        if a.rotary and (a.rotary.width % 2 or not 0 < a.rotary.width <= a.key_width):
            raise ConfigError(
                f"layer {index}: {a.rotary.width} of head_dim={a.key_width} features rotate; rotary embeddings"
                " need an even number of at least 2 and at most head_dim"
            )
    return config
