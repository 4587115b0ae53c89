"""Weights that are small integers times scales: what GPTQ, AWQ and compressed-tensors share once they are unpacked.

value[r, c] = scale[r, group of c] * q[r, c], where q is the stored integer minus its zero point. Where the groups are
whole blocks of 32 columns and scales are exact in half precision, that is what GGUF's Q4_0, Q5_0 and Q8_0 hold: zero
points then only move the integers, so 4 bits with any zero point fit into the 5 bits of Q5_0.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.weights.quantised.base import Logical

_BLOCK = 32
_BLOCK_BYTES = {"Q4_0": 18, "Q5_0": 22, "Q8_0": 34}
# The smallest and the largest integer that a layout holds.
_RANGE = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}


class IntegerWeight(Logical):
    """A matrix [rows, cols] of integers with scales [rows, groups]."""

    bits: int
    symmetric: bool
    rows: int
    cols: int
    group_size: int  # columns of one group; the last one may be smaller

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.cols)

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.cols // self.group_size)

    @abstractmethod
    def integers(self, start: int, stop: int) -> NDArray[np.int16]:
        """q of these rows, int16 [stop - start, cols]."""

    @abstractmethod
    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """Scales of these rows, float32 [stop - start, groups]."""

    @abstractmethod
    def integer_range(self) -> tuple[int, int]:
        """Bounds of q, from the zero points."""

    def column_groups(self) -> NDArray[np.int64] | None:
        """The group of every column, [cols]; None where they are in order, `group_size` columns each."""
        return None

    def per_column(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of groups [rows, groups], given to every column [rows, cols]."""
        order = self.column_groups()
        return np.repeat(values, self.group_size, axis=1)[:, : self.cols] if order is None else values[:, order]

    @cached_property
    def format(self) -> str:
        """Q4_0, Q5_0 or Q8_0 where that holds every number exactly, else "I4" or "I8"."""
        layout = self._layout()
        expanded = f"I{4 if self.bits <= 4 else 8}"
        in_order = self.column_groups() is None
        exact = self._scales_are_halves()  # also finds those that are no numbers
        blocks = self.cols % _BLOCK == 0 and (self.groups == 1 or self.group_size % _BLOCK == 0)
        low, high = self.integer_range()
        fits = _RANGE[layout][0] <= low and high <= _RANGE[layout][1]
        return layout if in_order and exact and blocks and fits else expanded

    def _layout(self) -> str:
        """One for all weights of a scheme: experts that become one stack must not differ."""
        signed_bits = self.bits + (not self.symmetric and self.bits >= 4)
        return "Q4_0" if signed_bits <= 4 else "Q5_0" if signed_bits == 5 else "Q8_0"

    def _scales_are_halves(self) -> bool:
        for first, last in self.chunks(self.groups, 0, self.rows):
            scales = self.scales(first, last)
            with np.errstate(over="ignore"):
                if not np.array_equal(scales.astype(np.float16).astype(np.float32), scales):
                    return False
        return True

    @property
    def nbytes(self) -> int:
        size = _BLOCK_BYTES.get(self.format)
        return super().nbytes if size is None else self.rows * self.cols // _BLOCK * size

    def numbers(self, start: int, stop: int) -> NDArray[np.float32]:
        out = np.empty((stop - start, self.cols), np.float32)
        for first, last in self.chunks(self.cols, start, stop):
            scales = self.per_column(self.scales(first, last))
            np.multiply(self.integers(first, last), scales, out=out[first - start : last - start], dtype=np.float32)
        return out

    def raw(self) -> NDArray[np.uint8]:
        layout = self.format
        if layout not in _BLOCK_BYTES:
            return super().raw()
        per_row = self.cols // _BLOCK
        out = np.empty((self.rows, per_row, _BLOCK_BYTES[layout]), np.uint8)
        for first, last in self.chunks(self.cols, 0, self.rows):
            scales = self.scales(first, last).astype("<f2").view(np.uint8).reshape(last - first, self.groups, 2)
            group = np.arange(per_row) * _BLOCK // self.group_size
            out[first:last, :, :2] = scales[:, group]
            q = self.integers(first, last).reshape(last - first, per_row, _BLOCK)
            _fill(layout, q, out[first:last, :, 2:])
        return out.reshape(-1)


def _fill(layout: str, q: NDArray[np.int16], out: NDArray[np.uint8]) -> None:
    """Integers [rows, blocks, 32] as the bytes that follow a block's scale."""
    if layout == "Q8_0":
        out[...] = q.astype(np.int8).view(np.uint8)
        return
    offset = 8 if layout == "Q4_0" else 16
    moved = (q + offset).astype(np.uint8)
    low, high = moved[..., :16], moved[..., 16:]
    if layout == "Q5_0":
        out[..., :4] = np.packbits(moved >> 4, axis=-1, bitorder="little")
        out = out[..., 4:]
    out[...] = (low & 15) | (high << 4)


def unpack_words(words: NDArray[np.uint32], bits: int, count: int) -> NDArray[np.uint8]:
    """Integers of `bits` bits out of 32-bit words, along axis 0: [words, m] -> [count, m].

    They follow one another without gaps, the first in the lowest bits; where `bits` does not divide 32 some lie across
    two words.
    """
    per_word = 32 // bits if 32 % bits == 0 else 32
    stride = 1 if 32 % bits == 0 else bits  # words after which the pattern repeats
    padded = -(-words.shape[0] // stride) * stride
    if padded != words.shape[0]:
        words = np.concatenate([words, np.zeros((padded - words.shape[0], words.shape[1]), words.dtype)])
    grouped = words.reshape(padded // stride, stride, words.shape[1])
    out = np.empty((grouped.shape[0], per_word, words.shape[1]), np.uint8)
    mask = np.uint32((1 << bits) - 1)
    for k in range(per_word):
        word, shift = divmod(k * bits, 32)
        value = grouped[:, word] >> np.uint32(shift)
        if shift + bits > 32:
            value = value | grouped[:, word + 1] << np.uint32(32 - shift)
        out[:, k] = value & mask
    return out.reshape(-1, words.shape[1])[:count]


def words_for(count: int, bits: int) -> int:
    """32-bit words that hold so many integers."""
    return -(-count * bits // 32)
