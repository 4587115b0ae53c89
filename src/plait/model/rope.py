"""Rotary frequencies: from a `RotarySpec` to the numbers that every rotate operation uses.

Sources: Su et al. 2021 (rotary embedding), Chen et al. 2023 (linear), Peng et al. 2023 (YaRN, and NTK-aware bases),
Ding et al. 2024 (LongRoPE), Meta 2024 (llama3), and the corrections that public checkpoints rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, floor, log, pi, sqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plait.errors import ConfigError
from plait.model.config import RotarySpec
from plait.ops.spec import RotaryTable

if TYPE_CHECKING:
    import torch

Numbers = NDArray[np.float32]


def rotary_numbers(spec: RotarySpec) -> tuple[Numbers, float]:
    """(inv_freq fp32 [width / 2], magnitude); the magnitude multiplies cos and sin.

    Computed in fp32 from integers, whatever dtype the model has.
    """
    if spec.divisors is not None:
        if len(spec.divisors) != spec.width // 2:
            raise ConfigError(f"rope_freqs has {len(spec.divisors)} divisors for {spec.width // 2} rotating pairs")
        return np.divide(_base(spec), np.array(spec.divisors, np.float32), dtype=np.float32), 1.0
    return _KINDS[spec.rope_type](spec)


def rope_frequencies(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    """`rotary_numbers` with the frequencies as a tensor."""
    import torch

    inv_freq, magnitude = rotary_numbers(spec)
    return torch.from_numpy(inv_freq), magnitude


def rotary_table(spec: RotarySpec) -> RotaryTable:
    """The same as plain numbers, as recordings store them."""
    inv_freq, magnitude = rotary_numbers(spec)
    table = RotaryTable(tuple(inv_freq.tolist()), magnitude)
    if not _two_sets(spec):
        return table
    return replace(
        table,
        long_inv_freq=tuple(_divided(spec, spec.scaling["long_factor"]).tolist()),
        original=int(spec.scaling["original_max_position_embeddings"]),
        long_magnitude=_longrope_magnitude(spec, "long_mscale"),
    )


def _two_sets(spec: RotarySpec) -> bool:
    """Whether a table is another one for sequences beyond the original context."""
    s = spec.scaling
    return spec.rope_type == "longrope" and (
        list(s["long_factor"]) != list(s["short_factor"])
        or _longrope_magnitude(spec, "long_mscale") != _longrope_magnitude(spec, "short_mscale")
    )


def short_rope_tokens(tables: Sequence[RotarySpec]) -> int:
    """The longest sequence that takes the short set of a longrope table; 0: there is no such table."""
    contexts = {int(t.scaling["original_max_position_embeddings"]) for t in tables if _two_sets(t)}
    return min(contexts, default=0)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """m(a) = 0.1 a ln s + 1, and 1 for s <= 1 (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def yarn_factor(spec: RotarySpec) -> float:
    """s: `factor`, else how many original contexts the maximum is."""
    factor = spec.scaling.get("factor")
    return spec.max_positions / spec.scaling["original_max_position_embeddings"] if factor is None else factor


def yarn_range(spec: RotarySpec) -> tuple[float, float]:
    """First and last pair index of the ramp between kept and interpolated frequencies."""
    scaling, d, theta = spec.scaling, spec.width, spec.theta
    original = scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        """Index of the pair that makes `turns` full turns over the original context."""
        return d * log(original / (turns * 2 * pi)) / (2 * log(theta))

    low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = floor(low), ceil(high)
    return max(low, 0), min(high, d - 1)


def _base(spec: RotarySpec) -> Numbers:
    """f_i = theta^(-2i/d), i = 0 .. d/2 - 1."""
    return _inverse(spec.theta, np.arange(0, spec.width, 2), spec.width)


def _inverse(theta: float, pairs: NDArray[np.int64], width: int) -> Numbers:
    """theta^(-pairs / width), every step rounded to fp32."""
    return np.float32(1) / np.float32(theta) ** (pairs.astype(np.float32) / np.float32(width))


def _default(spec: RotarySpec) -> tuple[Numbers, float]:
    return _base(spec), 1.0


def _linear(spec: RotarySpec) -> tuple[Numbers, float]:
    return _base(spec) / np.float32(spec.scaling["factor"]), 1.0


def _llama3(spec: RotarySpec) -> tuple[Numbers, float]:
    s, low, high = (np.float32(spec.scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = np.float32(spec.scaling["original_max_position_embeddings"])
    f = _base(spec)
    wavelength = np.float32(2 * pi) / f
    scaled = np.where(wavelength > context / low, f / s, f)
    t = (context / wavelength - low) / (high - low)
    blended = (1 - t) * scaled / s + t * scaled
    between = ~(wavelength < context / high) & ~(wavelength > context / low)
    return np.where(between, blended, scaled), 1.0


def _yarn(spec: RotarySpec) -> tuple[Numbers, float]:
    scaling = spec.scaling
    factor = yarn_factor(spec)
    low, high = yarn_range(spec)
    if low == high:
        high += 0.001
    pair = np.arange(spec.width // 2).astype(np.float32)
    ramp = ((pair - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    wave = np.float32(spec.theta) ** (np.arange(0, spec.width, 2).astype(np.float32) / np.float32(spec.width))
    keep = 1 - ramp
    one = np.float32(1)
    inv_freq = (one / (np.float32(factor) * wave)) * (1 - keep) + (one / wave) * keep
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        magnitude = yarn_mscale(factor, m) / yarn_mscale(factor, m_all) if m and m_all else yarn_mscale(factor)
    return inv_freq, float(magnitude)


def _proportional(spec: RotarySpec) -> tuple[Numbers, float]:
    d = spec.head_width
    turning = int(spec.scaling.get("partial_rotary_factor", 1.0) * d // 2)
    f = np.zeros(d // 2, np.float32)
    f[:turning] = _inverse(spec.theta, np.arange(0, 2 * turning, 2), d)
    return f / np.float32(spec.scaling.get("factor", 1.0)), 1.0


def _longrope(spec: RotarySpec) -> tuple[Numbers, float]:
    """The short set; `rotary_table` adds the long one."""
    return _divided(spec, spec.scaling["short_factor"]), _longrope_magnitude(spec, "short_mscale")


def _longrope_magnitude(spec: RotarySpec, own: str) -> float:
    """What the configuration says of this set (`own`) or of both, else sqrt(1 + ln r / ln C)."""
    scaling = spec.scaling
    original, magnitude = scaling["original_max_position_embeddings"], scaling.get(own)
    magnitude = scaling.get("attention_factor") if magnitude is None else magnitude
    if magnitude is None:
        factor = scaling.get("factor")
        factor = spec.max_positions / original if factor is None else factor
        magnitude = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
    return float(magnitude)


def _divided(spec: RotarySpec, divisors: Sequence[float]) -> Numbers:
    """1 / (divisor_i * theta^(2i/d)), as the authors' code rounds it."""
    wave = np.float32(spec.theta) ** (np.arange(0, spec.width, 2).astype(np.float32) / np.float32(spec.width))
    return np.divide(1, np.array(divisors, np.float32) * wave, dtype=np.float32)


def _dynamic(spec: RotarySpec) -> tuple[Numbers, float]:
    """NTK: a base that grows with the length L = max(M, served): theta ((s L / M) - (s - 1))^(d / (d - 2)).

    L is fixed, so that a key means the same however long its sequence becomes.
    """
    s, m, d = spec.scaling["factor"], spec.max_positions, spec.width
    length = max(m, spec.served_positions)
    return _base(replace(spec, theta=spec.theta * (s * length / m - (s - 1)) ** (d / (d - 2)))), 1.0


def _ntk_alpha(spec: RotarySpec) -> tuple[Numbers, float]:
    """theta alpha^(d / (d - 2)), whatever the length."""
    d = spec.width
    return _base(replace(spec, theta=spec.theta * spec.scaling["alpha"] ** (d / (d - 2)))), 1.0


_KINDS: dict[str, Callable[[RotarySpec], tuple[Numbers, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
    "longrope": _longrope,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
}
