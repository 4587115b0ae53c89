"""Attributes of operations: plain frozen data that a recording stores as JSON. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Pairing = Literal["halves", "adjacent"]


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
class RotaryTable:
    """Frequencies of one rotary embedding: angle of pair i at position p is p * inv_freq[i].

    inv_freq: fp32 values (as Python floats), one per rotating pair; magnitude multiplies cos and sin.
    """

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0

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
