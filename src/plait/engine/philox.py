"""Philox4x32-10: random numbers that are a function of (seed, choice, output position) and of nothing else.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
No state is carried from token to token, so that a request's draws depend neither on its batch mates
nor on preemption. Any other implementation of the layout below gives the same numbers.

Layout: key = (seed low 32 bits, seed high 32 bits); counter = (output position, choice, 0, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_FEW_ROWS = 8


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """The ten rounds: counter words c and key words k, 32 bits each -> four random words.

    All six are Python integers, or all are uint64 arrays of one shape.
    """
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Two independent numbers in [0, 1) per row, float64 [R, 2].

    seeds: 64 bits; choices, positions: 32 bits; R of each. Column 0 draws the token, column 1 is XTC's coin.
    Each is the top 53 bits of a pair of words (first word high) times 2^-53.
    """
    if len(seeds) <= _FEW_ROWS:  # a hundred numpy calls cost more than plain integers do
        rows = [
            philox4x32(position, choice, 0, 0, seed & _LOW, seed >> 32)
            for seed, choice, position in zip(seeds, choices, positions, strict=True)
        ]
        return np.array([[_unit(a, b), _unit(c, d)] for a, b, c, d in rows], np.float64).reshape(-1, 2)
    seed, choice, position = (np.array(values, np.uint64) for values in (seeds, choices, positions))
    zero = np.zeros_like(seed)
    a, b, c, d = philox4x32(position, choice, zero, zero, seed & _LOW, seed >> 32)
    return np.stack([_unit(a, b), _unit(c, d)], axis=-1)


def _unit(high: Any, low: Any) -> Any:
    return ((high << 21) | (low >> 11)) * 2.0**-53
