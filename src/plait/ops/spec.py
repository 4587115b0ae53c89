"""Attributes of operations: plain frozen data that a recording stores as JSON. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Pairing = Literal["halves", "adjacent"]
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
class RouterSpec:
    """How a token chooses top_k of num_experts, from logits = x W^T (+ b) in fp32.

    scores: "softmax" or "sigmoid" of all logits; "topk_softmax" selects by the logits and takes the softmax over the
    chosen. A per-expert selection bias, where there is one, is added to the scores for selection only. groups > 0: the
    experts form so many groups of consecutive ones, and only those of the top_groups best groups are eligible; a group
    scores its "best" selection score or the sum of its "two_best". masked: what ineligible experts have: "zero" makes
    their scores 0 (selection and weight), "minus_infinity" keeps them from being selected. Ties select the lower index.
    The weights are the scores of the chosen; renormalise: divided by their sum + 1e-20 "never", "always", or where
    "several" are chosen; then times scale.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    renormalise: Literal["never", "always", "several"] = "never"
    scale: float = 1.0
    groups: int = 0
    top_groups: int = 0
    group_score: Literal["best", "two_best"] = "best"
    masked: Literal["zero", "minus_infinity"] = "minus_infinity"

    @property
    def renormalises(self) -> bool:
        return self.renormalise == "always" or (self.renormalise == "several" and self.top_k > 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RotaryTable:
    """Frequencies of one rotary embedding: angle of pair i at position p is p * inv_freq[i].

    inv_freq: fp32 values (as Python floats), one per rotating pair; magnitude multiplies cos and sin.
    long_inv_freq: what takes their place for sequences that may become longer than `original` tokens (LongRoPE);
    empty: the table is the same for all. long_magnitude: the magnitude of these; None: the same.
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
