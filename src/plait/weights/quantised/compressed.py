"""compressed-tensors: "pack-quantized" (4 or 8 bits in words), "int-quantized" (int8) and "float-quantized" (FP8)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.model.quantisation import WeightScheme
from plait.weights.quantised.base import FLOATS, INTEGERS, Fetch
from plait.weights.quantised.integers import IntegerWeight, unpack_words, words_for
from plait.weights.sources import TensorInfo

# Suffixes of a module's name -> role. A packed weight has no ".weight".
ROLES = {
    ".weight": "weight",
    ".weight_packed": "weight_packed",
    ".weight_scale": "weight_scale",
    ".weight_zero_point": "weight_zero_point",
    ".weight_g_idx": "weight_g_idx",
    ".weight_shape": "weight_shape",
}
# Scales of activations and of keys and values, which are not used.
UNUSED = tuple(
    f".{of}_{what}"
    for of in ("input", "output", "q", "k", "v")
    for what in ("scale", "zero_point", "g_idx", "global_scale")
)


class CompressedInteger(IntegerWeight):
    """Signed integers: weight I8 [rows, cols], or weight_packed I32 [rows, cols * bits / 32] with 2 ** (bits - 1) added
    and weight_shape [2]; weight_scale [rows, groups] (or one number); weight_zero_point, in words down the rows where
    the weight is packed; weight_g_idx I32 [cols], of which -1 means in order."""

    def __init__(self, name: str, parts: Mapping[str, TensorInfo], fetch: Fetch, scheme: WeightScheme) -> None:
        super().__init__(name, parts, fetch)
        self.bits, self.symmetric = scheme.bits, scheme.symmetric
        self.origin = f"int{self.bits}"
        self._packed = scheme.storage == "pack-quantized"
        self._main = "weight_packed" if self._packed else "weight"
        self.need(self._main, "weight_scale", *(("weight_shape",) if self._packed else ()))
        if not self.symmetric:
            self.need("weight_zero_point")
        if scheme.act_order:
            self.need("weight_g_idx")
        self.rows, self.cols = self._shape()
        self.group_size = min(scheme.group_size or self.cols, self.cols)
        self._check(scheme)

    def _shape(self) -> tuple[int, int]:
        stored_rows, words = self.dims(self._main, 2)
        if not self._packed:
            return stored_rows, words
        self.expect("weight_shape", (2,), ("I64", "I32"))
        rows, cols = (int(n) for n in self.array("weight_shape"))
        if rows != stored_rows or cols < 1 or words_for(cols, self.bits) != words:
            held = f"[{stored_rows}, {words}] words of 32 bits"
            raise self.error(f"weight_shape says [{rows}, {cols}], which {held} do not hold")
        return rows, cols

    def _check(self, scheme: WeightScheme) -> None:
        self.expect(self._main, self.parts[self._main].shape, INTEGERS if self._packed else ("I8",))
        scale = tuple(self.parts["weight_scale"].shape)
        also = {"tensor": ((), (1,)), "channel": ((self.rows,),)}.get(scheme.strategy, ())
        full = (1, 1) if scheme.strategy == "tensor" else (self.rows, self.groups)
        self.expect("weight_scale", scale if scale in also else full, FLOATS)
        if "weight_zero_point" in self.parts:
            zero = self.parts["weight_zero_point"]
            if self._packed and zero.format == "I32":
                self.expect("weight_zero_point", (words_for(self.rows, self.bits), self.groups), INTEGERS)
            else:
                self.expect("weight_zero_point", scale, ("I8",))
        if "weight_g_idx" in self.parts:
            self.expect("weight_g_idx", (self.cols,), INTEGERS)

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        if "weight_g_idx" not in self.parts:
            return None
        order = self.array("weight_g_idx").view("<i4").astype(np.int64)
        if (order == -1).all() or np.array_equal(order, np.arange(self.cols) // self.group_size):
            return None
        if order.min() < 0 or order.max() >= self.groups:
            raise self.error(f"g_idx names groups from {order.min()} to {order.max()}, but there are {self.groups}")
        return order

    def column_groups(self) -> NDArray[np.int64] | None:
        return self._order

    @cached_property
    def _zeros(self) -> NDArray[np.int16] | None:
        if "weight_zero_point" not in self.parts:
            return None
        stored = self.array("weight_zero_point")
        if self.parts["weight_zero_point"].format == "I32":
            zeros = unpack_words(stored, self.bits, self.rows).astype(np.int16) - np.int16(1 << (self.bits - 1))
        else:
            zeros = np.broadcast_to(stored.reshape(-1, self.groups), (self.rows, self.groups)).astype(np.int16)
        return zeros if zeros.any() else None

    def integer_range(self) -> tuple[int, int]:
        half, zeros = 1 << (self.bits - 1), self._zeros
        if zeros is None:
            return -half, half - 1
        return -half - int(zeros.max()), half - 1 - int(zeros.min())

    def integers(self, start: int, stop: int) -> NDArray[np.int16]:
        stored = self.array(self._main)[start:stop]
        if self._packed:
            words = np.ascontiguousarray(stored.T)
            q = unpack_words(words, self.bits, self.cols).T.astype(np.int16) - np.int16(1 << (self.bits - 1))
        else:
            q = stored.astype(np.int16)
        if self._zeros is not None:
            q -= self.per_column(self._zeros[start:stop])
        return q

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._all_scales[start:stop]

    @cached_property
    def _all_scales(self) -> NDArray[np.float32]:
        return np.broadcast_to(self.floats("weight_scale").reshape(-1, self.groups), (self.rows, self.groups))
