"""FP8 (E4M3) with a scale per tensor, row or block, and MXFP4 with a power of two per 32 numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.model.quantisation import WeightScheme
from plait.weights.quantised.base import FLOATS, Fetch, Logical
from plait.weights.sources import TensorInfo


def _e4m3_values() -> NDArray[np.float32]:
    """The values of all 256 bytes: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, two NaNs."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa / 8.0, -6), np.ldexp(1.0 + mantissa / 8.0, np.maximum(exponent, 1) - 7)
    )
    magnitude[(byte & 127) == 127] = np.nan
    return (np.where(byte & 128, -1.0, 1.0) * magnitude).astype(np.float32)


E4M3 = _e4m3_values()


class Float8Weight(Logical):
    """weight F8_E4M3 [..., rows, cols] times scale, one number or [..., row blocks, column blocks]: 128 x 128 in
    DeepSeek-V3's files, the last ones smaller where that does not divide; one block a row for scales by channel."""

    origin = "FP8"

    def __init__(self, name: str, parts: Mapping[str, TensorInfo], fetch: Fetch, scheme: WeightScheme) -> None:
        super().__init__(name, parts, fetch)
        self.need("weight", "scale")
        weight = parts["weight"]
        self._shape = self.dims("weight", 3 if len(weight.shape) == 3 else 2)
        if weight.format != "F8_E4M3":
            raise self.error(f"{weight.name!r} is stored as {weight.format}; F8_E4M3 is expected")
        rows, cols = self._block(scheme)
        self.block = min(rows, self._shape[-2]), min(cols, self._shape[-1])

    def _block(self, scheme: WeightScheme) -> tuple[int, int]:
        """Rows and columns that share a scale; checks the scale's shape and type."""
        *stack, rows, cols = self._shape
        info = self.parts["scale"]
        shape = tuple(info.shape)
        one = shape in ((), (1,), (1, 1))
        by_tensor, by_row = (*stack, 1, 1), (*stack, rows, 1)
        if scheme.block is not None:
            block, expected = scheme.block, (*stack, -(-rows // scheme.block[0]), -(-cols // scheme.block[1]))
        elif scheme.strategy == "group":
            size = scheme.group_size or 1
            block, expected = (1, size), (*stack, rows, -(-cols // size))
        elif scheme.strategy == "channel" or (scheme.storage == "fp8" and shape in (by_row, (rows,)) and not one):
            block, expected = (1, cols), shape if shape == (rows,) and not stack else by_row
        else:
            block, expected = (rows, cols), shape if one and not stack else by_tensor
        bytes_as_powers = ("F8_E8M0", "U8") if scheme.storage == "fp8" else ()
        self.expect("scale", expected, (*FLOATS, *bytes_as_powers))
        return block

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @cached_property
    def format(self) -> str:
        return "F8_E4M3"

    @cached_property
    def _scales(self) -> NDArray[np.float32]:
        *stack, rows, cols = self._shape
        grid = (*stack, -(-rows // self.block[0]), -(-cols // self.block[1]))
        return self.floats("scale").reshape(grid)

    def numbers(self, start: int, stop: int) -> NDArray[np.float32]:
        stored = self.array("weight")
        out = np.empty((stop - start, *self._shape[1:]), np.float32)
        per_row = int(np.prod(self._shape[1:], dtype=np.int64))
        row_block, column_block = self.block
        for first, last in self.chunks(per_row, start, stop):
            part = stored[first:last]
            bad = int(np.count_nonzero((part & 127) == 127))
            if bad:
                raise self.error(f"{bad} of the numbers in rows {first} to {last - 1} are NaN (0x7F or 0xFF)")
            if part.ndim == 2:
                scales = self._scales[np.arange(first, last) // row_block]
            else:
                scales = np.repeat(self._scales[first:last], row_block, axis=1)[:, : part.shape[1]]
            scales = np.repeat(scales, column_block, axis=-1)[..., : part.shape[-1]]
            np.multiply(E4M3[part], scales, out=out[first - start : last - start])
        return out
