"""Quantises to the K types of GGUF: blocks of 256 numbers whose parts have scales of their own, themselves quantised.

The layouts are those of ggml; `gguf` expands them. What is searched for is the least squared error, weighted so that
large numbers count more, over a grid of scales; for each point of it the best scale (and minimum) of the rounded
numbers has a closed form. Arrays are [numbers of a part, parts], so that sums over a part are sums of long vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 256
# Blocks that are worked on at a time: their arrays stay in a core's own cache.
_BLOCKS = 256
_WITH_MINIMUM, _SYMMETRIC = 32, 16  # numbers of a part


def quantise_q4_k(values: Floats) -> Bytes:
    """float32 [R, C], 256 divides C, finite -> the blocks, uint8 [R, C / 256 * 144]."""
    return _in_pieces(values, _q4_k)


def quantise_q5_k(values: Floats) -> Bytes:
    """float32 [R, C], 256 divides C, finite -> the blocks, uint8 [R, C / 256 * 176]."""
    return _in_pieces(values, _q5_k)


def quantise_q6_k(values: Floats) -> Bytes:
    """float32 [R, C], 256 divides C, finite -> the blocks, uint8 [R, C / 256 * 210]."""
    return _in_pieces(values, _q6_k)


def _in_pieces(values: Floats, quantise: Callable[[Floats], Bytes]) -> Bytes:
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK)
    with np.errstate(all="ignore"):  # a scale beyond fp16 becomes infinite; whoever calls looks at the scales
        pieces = [quantise(blocks[start : start + _BLOCKS]) for start in range(0, len(blocks), _BLOCKS)]
    out = np.concatenate(pieces) if pieces else np.empty((0, 0), np.uint8)
    return out.reshape(len(values), -1)


def _q4_k(blocks: Floats) -> Bytes:
    steps = -1.0 + 0.1 * np.arange(21, dtype=np.float32)
    head, numbers = _with_minimum(blocks, 15, steps)
    pairs = numbers.reshape(len(blocks), 4, 2, 32)
    low = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return np.concatenate([head, low.reshape(len(blocks), 128)], 1)


def _q5_k(blocks: Floats) -> Bytes:
    steps = -0.5 + 0.1 * np.arange(16, dtype=np.float32)
    head, numbers = _with_minimum(blocks, 31, steps)
    pairs = numbers.reshape(len(blocks), 4, 2, 32)
    low = (pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4
    # Bit j of byte i is the fifth bit of number i of part j.
    bits = np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((numbers.reshape(len(blocks), 8, 32) >> 4) << bits, 1)
    return np.concatenate([head, high, low.reshape(len(blocks), 128)], 1)


def _with_minimum(blocks: Floats, largest: int, steps: Floats) -> tuple[Bytes, Bytes]:
    """x = d * scale * q - dmin * minimum, q in 0 .. largest, 6-bit scales and minima.

    Returns ([B, 16]: d, dmin and the scales as the file has them, [B, 256]: the q).
    """
    count = len(blocks)
    x = np.ascontiguousarray(blocks.reshape(-1, _WITH_MINIMUM).T)
    scale, minimum = (found.reshape(count, 8) for found in _fit_line(x, largest, steps))
    d, scales = _six_bits(scale)
    dmin, minima = _six_bits(minimum)
    effective = (d[:, None] * scales).reshape(-1)
    offset = (dmin[:, None] * minima).reshape(-1)
    divisor = np.where(effective == 0, np.float32(1), effective)
    q = np.clip(np.rint((x + offset) / divisor), 0, largest)
    numbers = np.where(effective == 0, 0, q).astype(np.uint8).T.reshape(count, BLOCK)
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    packed = (s[:, :4] | (s[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4)
    return np.concatenate([_half_bytes(d), _half_bytes(dmin), *packed], 1), np.ascontiguousarray(numbers)


def _six_bits(values: Floats) -> tuple[Floats, Floats]:
    """[B, 8], none negative -> (fp16 scale [B] as float32, numbers 0 .. 63 [B, 8]), their product near the values."""
    top = values.max(1)
    inverse = np.where(top > 0, np.float32(63) / np.where(top > 0, top, 1), 0)
    numbers = np.minimum(np.rint(values * inverse[:, None]), 63).astype(np.float32)
    return (top / np.float32(63)).astype(np.float16).astype(np.float32), numbers


def _fit_line(x: Floats, largest: int, steps: Floats) -> tuple[Floats, Floats]:
    """(scale, minimum), [N] each and not negative, so that scale * q - minimum is near x [32, N] for some q in
    0 .. largest."""
    size = np.abs(x).max(0)
    unit: Floats = np.where(size > 0, size, np.float32(1)).astype(np.float32)
    x = (x / unit).astype(np.float32, copy=False)  # neither squares nor cubes can overflow or vanish
    weight = np.sqrt(np.einsum("ij,ij->j", x, x) / np.float32(len(x))) + np.abs(x)
    low = np.minimum(x.min(0), 0)
    span = x.max(0) - low
    flat = span <= 0
    span = np.where(flat, np.float32(1), span).astype(np.float32)
    weighted = weight * x
    sum_w, sum_x, sum_xx = (
        a.astype(np.float64) for a in (weight.sum(0), weighted.sum(0), np.einsum("ij,ij->j", weighted, x))
    )
    above = x - low

    def sums(inverse: Floats) -> tuple[NDArray[np.float64], ...]:
        """Of w q, w q q and w x q, q being the rounded numbers."""
        q = np.rint(above * inverse)
        np.minimum(q, largest, out=q)
        wq = weight * q
        return (
            wq.sum(0).astype(np.float64),
            np.einsum("ij,ij->j", wq, q).astype(np.float64),
            np.einsum("ij,ij->j", weighted, q).astype(np.float64),
        )

    def error(scale: NDArray[np.float64], base: NDArray[np.float64], *of: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weighted sum of (scale * q + base - x)^2."""
        q, qq, xq = of
        return (
            scale * scale * qq + 2 * scale * base * q - 2 * scale * xq + base * base * sum_w - 2 * base * sum_x + sum_xx
        )

    best_scale, best_base = span.astype(np.float64) / largest, low.astype(np.float64)
    best = error(best_scale, best_base, *sums((np.float32(largest) / span).astype(np.float32, copy=False)))
    for step in steps:
        q, qq, xq = sums((np.float32(step + largest) / span).astype(np.float32, copy=False))
        determinant = sum_w * qq - q * q
        solvable = determinant > 0
        determinant = np.where(solvable, determinant, 1)
        scale = (sum_w * xq - sum_x * q) / determinant
        base = (qq * sum_x - q * xq) / determinant
        positive = base > 0
        base = np.where(positive, 0, base)
        scale = np.where(positive, xq / np.where(qq > 0, qq, 1), scale)
        found = error(scale, base, q, qq, xq)
        better = solvable & (found < best) & (scale >= 0)
        best = np.where(better, found, best)
        best_scale, best_base = np.where(better, scale, best_scale), np.where(better, base, best_base)
    best_scale = np.where(flat, 0, best_scale) * unit
    return best_scale.astype(np.float32), (-best_base * unit).astype(np.float32)


def _q6_k(blocks: Floats) -> Bytes:
    """x = d * scale * q, q in -32 .. 31, 8-bit scales for parts of 16."""
    count = len(blocks)
    x = np.ascontiguousarray(blocks.reshape(-1, _SYMMETRIC).T)
    scale = _fit_factor(x).reshape(count, 16)
    top = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    inverse = np.where(top != 0, np.float32(-128) / np.where(top != 0, top, 1), 0)
    d = np.where(top != 0, top / np.float32(-128), 0).astype(np.float16).astype(np.float32)
    scales = np.clip(np.rint(inverse * scale), -128, 127)
    effective = (d * scales).reshape(-1)
    divisor = np.where(effective == 0, np.float32(1), effective)
    q = np.where(effective == 0, 0, np.clip(np.rint(x / divisor), -32, 31)) + 32
    # Two halves of 128; in each, four runs of 32 whose low 4 bits and high 2 bits lie together.
    runs = q.astype(np.uint8).T.reshape(count, 2, 4, 32)
    low = (runs[:, :, :2] & 15) | (runs[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce((runs >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], 2)
    parts = [low.reshape(count, 128), high.reshape(count, 64), scales.astype(np.int8).view(np.uint8), _half_bytes(d)]
    return np.concatenate(parts, 1)


def _fit_factor(x: Floats) -> Floats:
    """The factor [N] so that factor * q is near x [16, N] for some q in -32 .. 31, weighted by x squared."""
    top = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    empty = top == 0
    top = np.where(empty, np.float32(1), top)
    x = (x / top).astype(np.float32, copy=False)  # the largest is 1 now
    squares = x * x
    cubes = squares * x
    best = np.zeros(x.shape[1], np.float32)
    factor = np.zeros(x.shape[1], np.float32)
    for step in (0, *range(-9, 0), *range(1, 10)):
        q = np.rint(x * np.float32(-(32 + 0.1 * step)))
        np.clip(q, -32, 31, out=q)
        xq, qq = np.einsum("ij,ij->j", cubes, q), np.einsum("ij,ij->j", squares * q, q)
        gain = xq * xq / qq  # qq > 0: the largest is never rounded to 0
        better = gain > best
        best = np.where(better, gain, best)
        factor = np.where(better, xq / qq, factor)
    return np.where(empty, 0, factor * top).astype(np.float32)


def _half_bytes(values: Floats) -> Bytes:
    return values.reshape(-1, 1).astype("<f2").view(np.uint8)
