"""Filters on one row of logits (numpy): which tokens may still be drawn, and the draw.

A row is treated alone, so that its result does not depend on its batch mates. `x` are logits float32 [V]; `z` is
(logits - max) * (1 / temperature) of the tokens that are left, by ascending id, and `w` their weights: e^z as integers.
A filter returns the positions to keep, ascending, or None for all. min-p and top-k need no weights and come first;
large vocabularies are not sorted unless the distribution is flat: a set {z >= cutoff} is a prefix of the sorted order,
and mostly a short one.

csrc/sample.cpp computes the same, token for token: integers add up to the same sum in any order, and what is not an
integer is made of single IEEE operations, in the order written here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Weights = NDArray[np.int64]

_SHORT_SETS = (-4.6, -9.2, -13.8)
_DISTANCES = (0.5, 1.0, 2.0, 4.0)
_DRAW_BLOCK = 256

# A weight is e^z in units of 2^-40: below z = -28.4 it is 0, and 8 million tokens of weight 1 fit in an integer.
_UNIT = 2.0**40
_LOWEST_Z = np.float32(-40)
_LOG2_E = np.float32(1.44269504)
_ROUND = np.float32(12582912)  # 1.5 * 2^23: the low bits of a sum with it are the rounded number
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# e^r = 1 + r + r^2 q(r) for |r| <= ln 2 / 2; q (lowest power first) fitted for the least relative error of e^r (3e-9).
_Q = [
    np.float32(c)
    for c in (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.0083687175065279, 0.0013814594130963087)
]
_CHUNK = 8192


def weights(z: Row) -> Weights:
    """Integer weights int64 [V] of z <= 0: e^z * 2^40, within 2^-22 of it relative to its size or half a unit."""
    result = np.empty(len(z), np.int64)
    for start in range(0, len(z), _CHUNK):  # a chunk at a time stays in the cache
        part = np.maximum(z[start : start + _CHUNK], _LOWEST_Z)
        shifted = part * _LOG2_E
        shifted += _ROUND
        n = shifted - _ROUND
        part -= n * _LN2_HIGH
        n *= _LN2_LOW
        part -= n
        square = part * part
        q = square * square
        q *= _Q[4]
        high = part * _Q[3]
        high += _Q[2]
        high *= square
        q += high
        np.multiply(part, _Q[1], out=high)
        high += _Q[0]
        q += high
        q *= square
        q += part
        q += np.float32(1)
        bits = q.view(np.int32)
        bits += shifted.view(np.int32) << 23
        wide = q.astype(np.float64)
        wide *= _UNIT
        np.rint(wide, out=wide)
        result[start : start + _CHUNK] = wide
    return result


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


def typical_p(z: Row, w: Weights, p: float) -> Ids | None:
    """Locally typical sampling (Meister et al. 2022): nearest to the entropy first, until their mass reaches p.

    -log of a token's probability less the entropy is the mean of z less its z.
    """
    if p >= 1:
        return None
    total = float(w.sum())
    moment = np.rint(w * np.where(w > 0, z, np.float32(0)).astype(np.float64)).astype(np.int64).sum()
    distance = np.abs(np.float32(float(moment) / total) - z)
    mass = _mass(p, total)
    near = _shortest((distance <= bound for bound in _DISTANCES), w, mass)
    order = near[_ascending(distance[near])]
    return np.sort(order[: _count_until(w[order], mass)])


def top_p(z: Row, w: Weights, p: float) -> Ids | None:
    """Keep, most likely first (equal ones by id), tokens while the mass before them is below p; the first stays."""
    if p >= 1:
        return None
    mass = _mass(p, float(w.sum()))
    short = _shortest((z >= np.float32(cutoff) for cutoff in _SHORT_SETS), w, mass)
    order = short[_ascending(-z[short])]
    return np.sort(order[: _count_until(w[order], mass)])


def _mass(p: float, total: float) -> int:
    """What p of the total is, at least one unit."""
    return max(math.ceil(p * total), 1)


def _shortest(masks: Iterable[NDArray[np.bool_]], w: Weights, mass: int) -> Ids:
    """Positions of the first mask, of growing ones, whose weights reach the mass; all positions if none does."""
    for mask in masks:
        positions = np.flatnonzero(mask)
        if w[positions].sum() >= mass:
            return positions
    return np.arange(len(w))


def _ascending(values: Row) -> Ids:
    """Stable argsort of values >= 0. Their bits sort as integers do; with the position below them one fast sort of
    integers does what numpy's stable argsort takes several times as long for."""
    values = values + np.float32(0)  # -0 becomes 0
    keys = values.view(np.uint32).astype(np.uint64) << np.uint64(32) | np.arange(len(values), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _count_until(w: Weights, mass: int) -> int:
    """How many of the weights, in order, have less than `mass` before them; at least 1."""
    return 1 + int(np.searchsorted(np.cumsum(w)[:-1], mass, side="left"))


def xtc(z: Row, w: Weights, threshold: float) -> Ids | None:
    """Exclude top choices (llama.cpp): of the tokens with probability >= threshold only the least likely stays."""
    if threshold > 0.5 or len(w) < 2:
        return None
    above = np.flatnonzero(w >= _mass(threshold, float(w.sum())))
    if len(above) < 2:
        return None
    # Of equally likely ones the last of the stable descending order stays: the highest id.
    values = z[above]
    keep = np.ones(len(w), bool)
    keep[above] = False
    keep[above[np.flatnonzero(values == values.min())[-1]]] = True
    return np.flatnonzero(keep)


def draw(w: Weights, u: float) -> int:
    """Inverse of the cumulative distribution, in order of position, at u in [0, 1)."""
    # Block sums first, then inside the block: the cumulative sum of a whole vocabulary costs more.
    blocks = np.cumsum(np.add.reduceat(w, np.arange(0, len(w), _DRAW_BLOCK)))
    total = int(blocks[-1])
    target = min(int(u * float(total)), total - 1)
    block = int(np.searchsorted(blocks, target, side="right"))
    inside = np.cumsum(w[block * _DRAW_BLOCK : (block + 1) * _DRAW_BLOCK])
    if block:
        target -= int(blocks[block - 1])
    return block * _DRAW_BLOCK + int(np.searchsorted(inside, target, side="right"))
