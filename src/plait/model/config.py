"""What a model is: switches per model and per layer. One `Decoder` is built from this and nothing else.

A family (plait.model.families) turns a config.json dictionary into a `ModelConfig`. No torch here, so
that `plait models` and `plait inspect` answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from plait.errors import ConfigError
from plait.model.latent_sizes import check_latent, latent_params
from plait.ops.spec import AttendSpec, LatentForm, LatentSpec, LayerCache, Pairing, RotaryFp32, RouterSpec


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
    """How a layer rotates: which of the model's tables, how many leading features of a head, and which pair up.

    fp32: what is not rounded on the way; only matters below fp32.
    """

    table: int = 0
    width: int = 0
    pairing: Pairing = "halves"
    fp32: RotaryFp32 = "nothing"


HeadNormOver = Literal["head", "own_head", "projection"]


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer. Biases each on their own; None means that the thing is absent.

    head_norm: the norm of q and k. head_norm_over: "head": every head with one weight; "own_head": every head with a
    weight of its own; "projection": all heads together. clip: q, k and v are limited to [-clip, clip] (0: not).
    sinks: a learned logit for each head joins the sum of its softmax.
    """

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
    head_norm_over: HeadNormOver = "head"
    head_norm_after_rotary: bool = False
    clip: float = 0.0
    window: int = 0
    soft_cap: float = 0.0
    rotary: RotaryUse | None = None
    sinks: bool = False

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
    def head_norm_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the weights of q's norm and of k's."""
        heads = (self.num_heads, self.num_kv_heads)
        if self.head_norm_over == "head":
            return (self.key_width,), (self.key_width,)
        if self.head_norm_over == "own_head":
            return (heads[0], self.key_width), (heads[1], self.key_width)
        return (heads[0] * self.key_width,), (heads[1] * self.key_width,)

    @property
    def cache(self) -> LayerCache:
        return LayerCache(self.num_kv_heads, self.key_width, self.value_width, self.window)


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Latent attention of one layer: keys and values of all heads are made of one latent and one rotary key per token.

    query_rank: width of the low-rank pair that queries come through, None for a single projection; its norm and the
    latent's are `inner_norm`. bias: on what projects into the latents and on o, never on what projects out of them. The
    last rope_width features of a head's query and key rotate. form: see `LatentSpec`.
    """

    num_heads: int
    latent_width: int
    nope_width: int
    rope_width: int
    value_width: int
    scale: float
    rotary: RotaryUse
    query_rank: int | None = None
    bias: bool = False
    inner_norm: NormSpec = NormSpec(eps=1e-6)
    form: LatentForm = "auto"

    @property
    def key_width(self) -> int:
        return self.nope_width + self.rope_width

    @property
    def window(self) -> int:
        """There are no windows over latents."""
        return 0

    @property
    def attend(self) -> LatentSpec:
        widths = (self.latent_width, self.nope_width, self.rope_width, self.value_width)
        return LatentSpec(self.num_heads, *widths, self.scale, self.form)

    @property
    def cache(self) -> LayerCache:
        return LayerCache(1, self.attend.row_width, 0)


@dataclass(frozen=True)
class FeedForwardSpec:
    """Feed-forward of one layer: gated (act(gate x) * up x, then down) or plain (act(up x), then down).

    alpha, limit: of the activation clamped_swiglu, which is a gated one; xielu is a plain one with numbers that are
    parameters.
    """

    width: int
    activation: str
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def numbers(self) -> dict[str, float]:
        """What the activation needs to be given."""
        return {"alpha": self.alpha, "limit": self.limit} if self.activation == "clamped_swiglu" else {}


@dataclass(frozen=True)
class MixtureSpec:
    """Feed-forward of one layer as a mixture: a router chooses some of its experts for each token.

    width, activation, gated, up_bias, down_bias, alpha, limit: of every expert, as in `FeedForwardSpec`. router_bias:
    of the router's linear; selection_bias: a bias per expert that counts in the selection only. shared: a feed-forward
    that every token goes through beside its experts; shared_gate: its result is multiplied by sigmoid(x w), w [1, D].
    """

    router: RouterSpec
    width: int
    activation: str
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    shared: FeedForwardSpec | None = None
    shared_gate: bool = False
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def numbers(self) -> dict[str, float]:
        """What the activation needs to be given."""
        return FeedForwardSpec(self.width, self.activation, alpha=self.alpha, limit=self.limit).numbers


@dataclass(frozen=True)
class LayerSpec:
    """One layer. A norm that is None is absent.

    Sequential: x += post_attention(attention(pre_attention(x))); x += post_feed_forward(ff(pre_feed_forward(x))).
    parallel: both branches read x (each through its own norm) and are added to it once. shared_norm: the feed-forward
    of a parallel layer reads what the attention reads. residual_first: its sum is (x + attention) + ff and not x +
    (attention + ff); only matters below fp32. branch_scale multiplies what each branch adds.
    """

    attention: AttentionSpec | LatentAttentionSpec
    feed_forward: FeedForwardSpec | MixtureSpec
    pre_attention_norm: NormSpec | None
    pre_feed_forward_norm: NormSpec | None
    post_attention_norm: NormSpec | None = None
    post_feed_forward_norm: NormSpec | None = None
    parallel: bool = False
    shared_norm: bool = False
    residual_first: bool = False
    branch_scale: float = 1.0


@dataclass(frozen=True)
class RotarySpec:
    """A rotary table before its frequencies are computed (plait.model.rope).

    rope_type: default, linear, llama3, yarn, proportional, longrope, dynamic, ntk_alpha. width: features of a head that
    rotate. scaling: the type's own keys, as in config.json. divisors: per-pair divisors that a GGUF file carries
    (replaces llama3's own arithmetic). served_positions: the longest sequence that a dynamic table is made for, where
    that is more than max_positions.
    """

    rope_type: str
    theta: float
    width: int
    head_width: int
    max_positions: int
    scaling: Mapping[str, Any] = field(default_factory=dict)
    divisors: tuple[float, ...] | None = None
    served_positions: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model.

    raw: the config.json dictionary that it came from; it is what `save_pretrained` writes back.
    embedding_scale is rounded to the weights' dtype before use when round_embedding_scale is set (Gemma).
    position_rows: rows of a table of learned positions (0: there is none); position p reads row p + position_offset.
    logit_scale multiplies the hidden states that the head reads. next_token_layers: how many layers after the last a
    checkpoint may hold that predict further tokens; they are no part of this model. Of training only: dropout
    probabilities; scaled_residuals: a new model's residual projections begin smaller (`from_config`);
    balance_loss_coef, z_loss_coef: what a mixture's losses are multiplied by where a recipe says nothing.
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
    position_rows: int = 0
    position_offset: int = 0
    logit_scale: float = 1.0
    head_bias: bool = False
    logit_soft_cap: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    hidden_dropout: float = 0.0
    scaled_residuals: bool = False
    balance_loss_coef: float = 0.01
    z_loss_coef: float = 0.001
    fp16_overflows: bool = False
    next_token_layers: int = 1
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
        """Parameters: total (a tied head counted once), active (of a mixture's experts only those that one token goes
        through), embedding, attention, ffn_total (routers included), norms."""
        d = self.hidden_size
        counts = dict.fromkeys(("embedding", "head", "attention", "ffn_total", "norms"), 0)
        counts["embedding"] = (self.vocab_size + self.position_rows) * d
        counts["head"] = (0 if self.tie_embeddings else self.vocab_size * d) + self.head_bias * self.vocab_size
        counts["norms"] += _norm_params(self.final_norm, d)
        idle = 0
        for layer in self.layers:
            f = layer.feed_forward
            attention, inner_norms = _attention_params(layer.attention, d)
            counts["attention"] += attention
            counts["norms"] += inner_norms
            counts["ffn_total"] += _feed_forward_params(f, d)
            if isinstance(f, MixtureSpec):
                idle += (f.router.num_experts - f.router.top_k) * _expert_params(f, d)
            for norm in (
                layer.pre_attention_norm,
                layer.pre_feed_forward_norm,
                layer.post_attention_norm,
                layer.post_feed_forward_norm,
            ):
                counts["norms"] += _norm_params(norm, d)
        total = sum(counts.values())
        return {"total": total, "active": total - idle, **counts}


# More experts than any model has, so that a damaged configuration is refused before anything is made for each.
MAX_EXPERTS = 100_000
# What stays float32 whatever the model's dtype: one choice of expert decides more than a rounding may.
_FLOAT32 = (".mlp.gate.weight", ".mlp.gate.bias", ".mlp.gate.e_score_correction_bias")


def keeps_float32(name: str) -> bool:
    """Whether a parameter of this name is float32 in every model: a router's weight and biases."""
    return name.endswith(_FLOAT32)


def _attention_params(a: AttentionSpec | LatentAttentionSpec, hidden_size: int) -> tuple[int, int]:
    """Of projections with their biases, and of the norms inside."""
    if isinstance(a, LatentAttentionSpec):
        return latent_params(a, hidden_size)
    q, k, v = a.num_heads * a.key_width, a.num_kv_heads * a.key_width, a.num_kv_heads * a.value_width
    o = a.num_heads * a.value_width
    count = hidden_size * (q + k + v + o) + a.q_bias * q + a.k_bias * k + a.v_bias * v + a.o_bias * hidden_size
    count += a.sinks * a.num_heads
    return count, sum(_norm_params(a.head_norm, prod(shape)) for shape in a.head_norm_shapes)


def _expert_params(f: FeedForwardSpec | MixtureSpec, hidden_size: int) -> int:
    """Of one feed-forward, or of one expert of a mixture."""
    ups = 2 if f.gated else 1
    biases = f.up_bias * f.width * ups + f.down_bias * hidden_size
    return hidden_size * f.width * (ups + 1) + biases + 4 * (f.activation == "xielu")


def _feed_forward_params(f: FeedForwardSpec | MixtureSpec, hidden_size: int) -> int:
    if isinstance(f, FeedForwardSpec):
        return _expert_params(f, hidden_size)
    count = f.router.num_experts * (hidden_size + f.router_bias + f.selection_bias + _expert_params(f, hidden_size))
    if f.shared is not None:
        count += _expert_params(f.shared, hidden_size) + f.shared_gate * hidden_size
    return count


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
    mixtures = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, MixtureSpec)]
    experts = sum(mixture.router.num_experts for mixture in mixtures)
    if experts > MAX_EXPERTS:
        raise ConfigError(f"{experts} experts in all layers together; at most {MAX_EXPERTS} are allowed")
    for index, layer in enumerate(config.layers):
        a, f = layer.attention, layer.feed_forward
        if isinstance(a, LatentAttentionSpec):
            check_latent(index, a, f.width)
        else:
            _check_attention(index, a, f.width)
        if isinstance(f, MixtureSpec):
            _check_mixture(index, f)
        if f.activation == "xielu" and (f.gated or isinstance(f, MixtureSpec)):
            raise ConfigError(f"layer {index}: the activation xielu is for plain feed-forwards")
        if f.activation == "clamped_swiglu" and not (f.gated and f.limit > 0):
            raise ConfigError(f"layer {index}: the activation clamped_swiglu needs a gate and a limit above 0")
    return config


def _check_attention(index: int, a: AttentionSpec, ffn_width: int) -> None:
    if min(a.num_heads, a.num_kv_heads, a.key_width, a.value_width, ffn_width) < 1:
        raise ConfigError(
            f"layer {index}: num_attention_heads={a.num_heads}, num_key_value_heads={a.num_kv_heads},"
            f" head_dim={a.key_width} and intermediate_size={ffn_width} must all be at least 1"
        )
    if a.num_heads % a.num_kv_heads:
        raise ConfigError(
            f"layer {index}: num_attention_heads={a.num_heads} is no multiple of num_key_value_heads={a.num_kv_heads}"
        )
    if a.window < 0:
        raise ConfigError(f"layer {index}: sliding_window={a.window} must not be negative")
    if a.rotary and (a.rotary.width % 2 or not 0 < a.rotary.width <= a.key_width):
        raise ConfigError(
            f"layer {index}: {a.rotary.width} of head_dim={a.key_width} features rotate; rotary embeddings"
            " need an even number of at least 2 and at most head_dim"
        )


def _check_mixture(index: int, mixture: MixtureSpec) -> None:
    r = mixture.router
    if mixture.shared is not None and mixture.shared.width < 1:
        raise ConfigError(f"layer {index}: the shared expert's width {mixture.shared.width} must be at least 1")
    if r.scores == "sparse_mixer" and r.top_k != 2:
        raise ConfigError(f"layer {index}: num_experts_per_tok={r.top_k}; a sparse mixer takes two experts")
    if not 1 <= r.top_k <= r.num_experts:
        raise ConfigError(
            f"layer {index}: num_experts_per_tok={r.top_k} must be at least 1 and at most the number of"
            f" experts, {r.num_experts}"
        )
    if not r.groups:
        return
    if r.groups < 0 or r.num_experts % r.groups or not 1 <= r.top_groups <= r.groups:
        raise ConfigError(
            f"layer {index}: n_group={r.groups} must divide the number of experts, {r.num_experts}, and"
            f" topk_group={r.top_groups} must be at least 1 and at most n_group"
        )
    size = r.num_experts // r.groups
    if r.top_k > r.top_groups * size:
        raise ConfigError(
            f"layer {index}: num_experts_per_tok={r.top_k} is more than the {r.top_groups * size} experts of"
            f" topk_group={r.top_groups} groups"
        )
    if r.group_score == "two_best" and size < 2:
        raise ConfigError(f"layer {index}: groups that score by their two best experts need two; n_group={r.groups}")
