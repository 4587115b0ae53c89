"""Attributes of operations: plain frozen data that a recording stores as JSON. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Pairing = Literal["halves", "adjacent"]
LatentForm = Literal["auto", "expanded", "absorbed"]
# What of a rotation stays in fp32 where the model's dtype is shorter: nothing; products and sums, of tables rounded to
# that dtype; or the tables too.
RotaryFp32 = Literal["nothing", "products", "tables"]


@dataclass(frozen=True)
class AttendSpec:
    """One layer's attention: grouped-query heads over what the memory holds.

    scale multiplies q . k; window w > 0 hides keys with q - k >= w; soft_cap c > 0 maps a scaled score s
    to c * tanh(s / c) before masking.
    """

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LatentSpec:
    """One layer's latent attention (DeepSeek-AI 2024, section 2.1): every head reads the same cached rows [c ; k_rope].

    latent_width: r, of the normalised latent c. A head's query and key have nope_width features that do not rotate and
    then rope_width that do, its value value_width. scale multiplies q . k. form: which of two equal computations is
    made; "auto" lets plait.ops.latent choose for each sequence of a step.
    """

    num_heads: int
    latent_width: int
    nope_width: int
    rope_width: int
    value_width: int
    scale: float
    form: LatentForm = "auto"

    @property
    def key_width(self) -> int:
        return self.nope_width + self.rope_width

    @property
    def row_width(self) -> int:
        """Numbers that a token keeps: r + rope_width."""
        return self.latent_width + self.rope_width

    @property
    def expanded(self) -> AttendSpec:
        """Every head over keys and values of its own."""
        return AttendSpec(self.num_heads, self.num_heads, self.key_width, self.value_width, self.scale)

    @property
    def absorbed(self) -> AttendSpec:
        """All heads over one: the cached rows, whose first r features are the values."""
        return AttendSpec(self.num_heads, 1, self.row_width, self.latent_width, self.scale)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses top_k of num_experts, from logits = x W^T (+ b) in fp32.

    scores: "softmax" or "sigmoid" of all logits; "topk_softmax" selects by the logits and takes the softmax over the
    chosen; "sparse_mixer" chooses two, each with its share among those that `jitter` calls close to it, and has nothing
    of what follows but scale. A per-expert selection bias, where there is one, is added to the scores for selection
    only. groups > 0: the experts form so many groups of consecutive ones, and only those of the top_groups best groups
    are eligible; a group scores its "best" selection score or the sum of its "two_best". masked: what ineligible
    experts have: "zero" makes their scores 0 (selection and weight), "minus_infinity" keeps them from being selected.
    Ties select the lower index.
    The weights are the scores of the chosen; renormalise: divided by their sum + 1e-20 "never", "always", or where
    "several" are chosen; least_sum > 0: by their sum or that, whichever is more; then times scale.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "topk_softmax", "sparse_mixer"] = "softmax"
    renormalise: Literal["never", "always", "several"] = "never"
    scale: float = 1.0
    groups: int = 0
    top_groups: int = 0
    group_score: Literal["best", "two_best"] = "best"
    masked: Literal["zero", "minus_infinity"] = "minus_infinity"
    least_sum: float = 0.0
    jitter: float = 0.0

    @property
    def renormalises(self) -> bool:
        return self.renormalise == "always" or (self.renormalise == "several" and self.top_k > 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RotaryTable:
    """Frequencies of one rotary embedding: angle of pair i at position p is p * inv_freq[i].

    inv_freq: fp32 values (as Python floats), one per rotating pair; magnitude multiplies cos and sin.
    long_inv_freq, long_magnitude: what takes their place for sequences that may become longer than `original` tokens
    (LongRoPE); empty: the table is the same for all. A long_magnitude of None is the same as the other.
    """

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0
    long_inv_freq: tuple[float, ...] = ()
    original: int = 0
    long_magnitude: float | None = None

    @property
    def width(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps per token.

    num_kv_heads rows of key_width and of value_width numbers (a latent layer: one head whose value is
    a view of the key, so value_width 0). window: 0 for full attention, else a key is visible iff
    0 <= query - key < window.
    """

    num_kv_heads: int
    key_width: int
    value_width: int
    window: int = 0

    @property
    def numbers_per_token(self) -> int:
        return self.num_kv_heads * (self.key_width + self.value_width)
