"""AWQ in its "gemm" version: eight outputs to a word, in the order that its kernels wanted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.model.quantisation import WeightScheme
from plait.weights.quantised.base import FLOATS, INTEGERS, Fetch
from plait.weights.quantised.integers import IntegerWeight
from plait.weights.sources import TensorInfo

ROLES = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales"}
# Nibble i of a word, from the lowest bits up, holds this one of its eight outputs.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AwqWeight(IntegerWeight):
    """qweight I32 [in, out / 8], qzeros I32 [groups, out / 8], scales [groups, out]."""

    def __init__(self, name: str, parts: Mapping[str, TensorInfo], fetch: Fetch, scheme: WeightScheme) -> None:
        super().__init__(name, parts, fetch)
        self.bits, self.symmetric = scheme.bits, scheme.symmetric
        self.origin = f"AWQ {self.bits}-bit"
        self.need("qweight", "qzeros", "scales")
        self.cols, words = self.dims("qweight", 2)
        self.rows = words * 8
        self.group_size = min(scheme.group_size or self.cols, self.cols)
        self.expect("qweight", (self.cols, words), INTEGERS)
        self.expect("qzeros", (self.groups, words), INTEGERS)
        self.expect("scales", (self.groups, self.rows), FLOATS)

    @cached_property
    def _zeros(self) -> NDArray[np.int16]:
        return _unpack(self.array("qzeros"))

    def integer_range(self) -> tuple[int, int]:
        zeros = self._zeros
        return -int(zeros.max(initial=0)), 15 - int(zeros.min(initial=15))

    def integers(self, start: int, stop: int) -> NDArray[np.int16]:
        first, last = start // 8, -(-stop // 8)
        q = _unpack(self.array("qweight")[:, first:last])[start - 8 * first : stop - 8 * first]
        q -= np.repeat(self._zeros[start:stop], self.group_size, axis=1)[:, : self.cols]
        return q

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._all_scales[start:stop]

    @cached_property
    def _all_scales(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.floats("scales").T)


def _unpack(words: NDArray[np.uint32]) -> NDArray[np.int16]:
    """Words [n, m] -> their nibbles [8 m, n], outputs first."""
    n, m = words.shape
    out = np.empty((m, 8, n), np.int16)
    for nibble, output in enumerate(ORDER):
        out[:, output] = ((words >> np.uint32(4 * nibble)) & np.uint32(15)).T
    return out.reshape(8 * m, n)
