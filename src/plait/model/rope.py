"""Rotary frequencies: from a `RotarySpec` to the numbers that every rotate operation uses.

Sources: Su et al. 2021 (rotary embedding), Chen et al. 2023 (linear), Peng et al. 2023 (YaRN), Meta 2024 (llama3),
and the corrections that public checkpoints rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log, pi

import torch

from plait.errors import ConfigError
from plait.model.config import RotarySpec
from plait.ops.spec import RotaryTable


def rope_frequencies(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    """(inv_freq fp32 [width / 2], magnitude); the magnitude multiplies cos and sin.

    Computed in fp32 from integers on the CPU, whatever dtype or device the model has.
    """
    with torch.device("cpu"):
        if spec.divisors is not None:
            base = _base(spec)
            if len(spec.divisors) != len(base):
                raise ConfigError(f"rope_freqs has {len(spec.divisors)} divisors for {len(base)} rotating pairs")
            return base / torch.tensor(spec.divisors, dtype=torch.float32), 1.0
        return _KINDS[spec.rope_type](spec)


def rotary_table(spec: RotarySpec) -> RotaryTable:
    """The same as plain numbers, as recordings store them."""
    inv_freq, magnitude = rope_frequencies(spec)
    return RotaryTable(tuple(inv_freq.tolist()), magnitude)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """m(a) = 0.1 a ln s + 1, and 1 for s <= 1 (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


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


def _base(spec: RotarySpec) -> torch.Tensor:
    """f_i = theta^(-2i/d), i = 0 .. d/2 - 1."""
    exponent = torch.arange(0, spec.width, 2, dtype=torch.int64).float() / spec.width
    return 1.0 / (spec.theta**exponent)


def _default(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    return _base(spec), 1.0


def _linear(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    return _base(spec) / spec.scaling["factor"], 1.0


def _llama3(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    s, low, high = (spec.scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = spec.scaling["original_max_position_embeddings"]
    f = _base(spec)
    wavelength = 2 * pi / f
    scaled = torch.where(wavelength > context / low, f / s, f)
    t = (context / wavelength - low) / (high - low)
    blended = (1 - t) * scaled / s + t * scaled
    between = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(between, blended, scaled), 1.0


def _yarn(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    scaling = spec.scaling
    factor = scaling.get("factor")
    if factor is None:
        factor = spec.max_positions / scaling["original_max_position_embeddings"]
    low, high = yarn_range(spec)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wave = spec.theta ** (torch.arange(0, spec.width, 2).float() / spec.width)
    keep = 1 - ramp
    inv_freq = (1.0 / (factor * wave)) * (1 - keep) + (1.0 / wave) * keep
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        magnitude = yarn_mscale(factor, m) / yarn_mscale(factor, m_all) if m and m_all else yarn_mscale(factor)
    return inv_freq, float(magnitude)


def _proportional(spec: RotarySpec) -> tuple[torch.Tensor, float]:
    d = spec.head_width
    turning = int(spec.scaling.get("partial_rotary_factor", 1.0) * d // 2)
    f = 1.0 / (spec.theta ** (torch.arange(0, 2 * turning, 2, dtype=torch.int64).float() / d))
    return torch.cat((f, torch.zeros(d // 2 - turning))) / spec.scaling.get("factor", 1.0), 1.0


_KINDS: dict[str, Callable[[RotarySpec], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
