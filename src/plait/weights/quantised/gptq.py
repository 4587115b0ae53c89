"""GPTQ: integers packed down the columns of a transposed matrix, with scales, zero points and the order of columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.model.quantisation import WeightScheme
from plait.weights.quantised.base import FLOATS, INTEGERS, Fetch, turned
from plait.weights.quantised.integers import IntegerWeight, unpack_words, words_for
from plait.weights.sources import TensorInfo

# Suffixes of a module's name -> the part's role; the first is the one that holds the numbers.
ROLES = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales", ".g_idx": "g_idx"}


class GptqWeight(IntegerWeight):
    """qweight I32 [in * bits / 32, out], qzeros I32 [groups, out * bits / 32], scales [groups, out], g_idx I32 [in].

    The older format stores zero points less one. Programs subtract a one for every zero point from the whole word, so
    that a zero point of 0 borrows from its neighbour; of 3 bits, which words cut, each by itself and modulo 8.
    """

    def __init__(self, name: str, parts: Mapping[str, TensorInfo], fetch: Fetch, scheme: WeightScheme) -> None:
        super().__init__(name, parts, fetch)
        self.bits, self.symmetric = scheme.bits, scheme.symmetric
        self.origin = f"GPTQ {self.bits}-bit"
        self._zero_offset = scheme.zero_offset
        self.need("qweight", "qzeros", "scales", *(("g_idx",) if scheme.act_order else ()))
        words, self.rows = self.dims("qweight", 2)
        self.cols = self._columns(words)
        self.group_size = min(scheme.group_size or self.cols, self.cols)
        self.expect("qweight", (words_for(self.cols, self.bits), self.rows), INTEGERS)
        self.expect("qzeros", (self.groups, words_for(self.rows, self.bits)), INTEGERS)
        self.expect("scales", (self.groups, self.rows), FLOATS)
        if "g_idx" in parts:
            self.expect("g_idx", (self.cols,), INTEGERS)

    def _columns(self, words: int) -> int:
        """From the words that hold a row: what they would hold when full, but g_idx knows it exactly."""
        if "g_idx" in self.parts:
            return self.dims("g_idx", 1)[0]
        return words * 32 // self.bits

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        if "g_idx" not in self.parts:
            return None
        order = self.array("g_idx").view("<i4").astype(np.int64)
        if np.array_equal(order, np.arange(self.cols) // self.group_size):
            return None
        if order.min() < 0 or order.max() >= self.groups:
            raise self.error(f"g_idx names groups from {order.min()} to {order.max()}, but there are {self.groups}")
        return order

    def column_groups(self) -> NDArray[np.int64] | None:
        return self._order

    @cached_property
    def _zeros(self) -> NDArray[np.int16]:
        """Zero points [rows, groups]."""
        words = self.array("qzeros").T
        if self.bits == 3:
            return ((unpack_words(words, 3, self.rows) + np.uint8(self._zero_offset)) & np.uint8(7)).astype(np.int16)
        ones = sum(1 << place for place in range(0, 32, self.bits)) * self._zero_offset
        return unpack_words(words + np.uint32(ones), self.bits, self.rows).astype(np.int16)

    def integer_range(self) -> tuple[int, int]:
        zeros = self._zeros
        return -int(zeros.max(initial=0)), (1 << self.bits) - 1 - int(zeros.min(initial=255))

    def integers(self, start: int, stop: int) -> NDArray[np.int16]:
        q = turned(unpack_words(self.array("qweight")[:, start:stop], self.bits, self.cols), np.int16)
        return q - self.per_column(self._zeros[start:stop])

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._all_scales[start:stop]

    @cached_property
    def _all_scales(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.floats("scales").T)
