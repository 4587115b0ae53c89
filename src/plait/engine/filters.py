"""Filters on one row of logits (numpy, fp32): which tokens may still be drawn, and the draw.

A row is treated alone, so that its result does not depend on its batch mates. `x` are logits float32 [V]; `z` is
(logits - max) / temperature of the tokens that are left, by ascending id, and e = exp(z), so that max e = 1. A filter
returns the positions to keep, ascending, or None for all. min-p and top-k need no exponentials and come
first; large vocabularies are not sorted unless the distribution is flat: a set {e >= cutoff} is a prefix of the sorted
order, and mostly a short one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

_CUTOFFS = (1e-2, 1e-4, 1e-6)
_DISTANCES = (0.5, 1.0, 2.0, 4.0)
_DRAW_BLOCK = 256


def kth_largest(x: Row, k: int) -> np.float32:
    """The k-th largest entry of x [V], 1 <= k <= V."""
    columns = len(x) // 64
    if k <= columns // 4:
        # Each column maximum is an entry: the k-th largest of them bounds the k-th largest entry from below.
        maxima = np.maximum.reduce(x[: 64 * columns].reshape(64, columns), axis=0)
        x = x[x >= np.partition(maxima, columns - k)[columns - k]]
    return np.partition(x, len(x) - k)[len(x) - k]


def largest(x: Row, k: int) -> Ids:
    """Ids of the k largest entries of x, best first, equal ones by id."""
    k = min(k, len(x))
    if k <= 0:
        return np.empty(0, np.int64)
    ids = np.flatnonzero(x >= kth_largest(x, k))
    return ids[np.argsort(-x[ids], kind="stable")][:k]


def min_p(x: Row, highest: np.float32, temperature: float, threshold: float) -> Ids | None:
    """Keep tokens at least `threshold` times as likely as the most likely one, whose logit is `highest`."""
    if threshold <= 0:
        return None
    return np.flatnonzero(x >= highest + np.float32(temperature * np.log(threshold)))


def top_k(x: Row, k: int) -> Ids | None:
    """Keep every token not below the k-th largest (ties stay); k <= 0 or k >= V keeps all."""
    if k <= 0 or k >= len(x):
        return None
    return np.flatnonzero(x >= kth_largest(x, k))


def typical_p(z: Row, e: Row, p: float) -> Ids | None:
    """Locally typical sampling (Meister et al. 2022): nearest to the entropy first, until their mass reaches p."""
    if p >= 1:
        return None
    total = np.add.reduce(e, dtype=np.float64)
    finite = np.where(e > 0, z, np.float32(0))
    entropy = np.log(total) - np.add.reduce(e * finite, dtype=np.float64) / total
    distance = np.abs(np.float32(np.log(total) - entropy) - z)
    mass = p * float(total)
    near = _shortest((distance <= bound for bound in _DISTANCES), e, mass)
    order = near[_ascending(distance[near])]
    return np.sort(order[: _count_until(e[order], mass)])


def top_p(e: Row, p: float) -> Ids | None:
    """Keep, most likely first (equal ones by id), tokens while the mass before them is below p; the first stays."""
    if p >= 1:
        return None
    mass = p * float(np.add.reduce(e, dtype=np.float64))
    short = _shortest((e >= np.float32(cutoff) for cutoff in _CUTOFFS), e, mass)
    candidates = e[short]
    values = np.sort(candidates)[::-1]
    count = _count_until(values, mass)
    lowest = values[count - 1]
    keep = candidates > lowest
    ties = np.flatnonzero(candidates == lowest)[: count - int(np.count_nonzero(keep))]
    keep[ties] = True
    return short[keep]


def _shortest(masks: Iterable[NDArray[np.bool_]], weights: Row, mass: float) -> Ids:
    """Positions of the first mask, of growing ones, whose weights reach the mass; all positions if none does."""
    for mask in masks:
        positions = np.flatnonzero(mask)
        if float(np.add.reduce(weights[positions], dtype=np.float64)) >= mass:
            return positions
    return np.arange(len(weights))


def _ascending(values: Row) -> Ids:
    """Stable argsort of values >= 0. Their bits sort as integers do; with the position below them one fast sort of
    integers does what numpy's stable argsort takes several times as long for."""
    keys = values.view(np.uint32).astype(np.uint64) << np.uint64(32) | np.arange(len(values), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _count_until(weights: Row, mass: float) -> int:
    """How many of the weights, in order, have less than `mass` before them; at least 1."""
    before = np.cumsum(weights.astype(np.float64))
    return 1 + int(np.searchsorted(before[:-1], mass, side="left"))


def xtc(e: Row, threshold: float) -> Ids | None:
    """Exclude top choices (llama.cpp): of the tokens with probability >= threshold only the least likely stays."""
    if threshold > 0.5 or len(e) < 2:
        return None
    above = np.flatnonzero(e >= threshold * float(np.add.reduce(e, dtype=np.float64)))
    if len(above) < 2:
        return None
    # Of equally likely ones the last of the stable descending order stays: the highest id.
    values = e[above]
    keep = np.ones(len(e), bool)
    keep[above] = False
    keep[above[np.flatnonzero(values == values.min())[-1]]] = True
    return np.flatnonzero(keep)


def draw(e: Row, u: float) -> int:
    """Inverse of the cumulative distribution, in order of position, at u in [0, 1)."""
    if len(e) <= 4 * _DRAW_BLOCK:
        return _invert(np.cumsum(e.astype(np.float64)), u)
    # Block sums first, then inside the block: the cumulative sum of a whole vocabulary costs more.
    blocks = len(e) // _DRAW_BLOCK
    whole = np.add.reduce(e[: blocks * _DRAW_BLOCK].reshape(blocks, _DRAW_BLOCK), axis=1)
    sums = np.append(whole, np.add.reduce(e[blocks * _DRAW_BLOCK :]))
    total = np.cumsum(sums.astype(np.float64))
    block = _invert(total, u)
    first = block * _DRAW_BLOCK
    inside = np.cumsum(e[first : first + _DRAW_BLOCK].astype(np.float64))
    left = u * total[-1] - (total[block - 1] if block else 0.0)
    return first + _first_above(inside, left)


def _invert(cumulative: NDArray[np.float64], u: float) -> int:
    return _first_above(cumulative, u * float(cumulative[-1]))


def _first_above(cumulative: NDArray[np.float64], target: float) -> int:
    """First index whose cumulative weight exceeds target; the last weighted one where rounding left none."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index == len(cumulative):
        index = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return index
