"""MXFP4 as gpt-oss stores its experts: two E2M1 numbers to a byte, a power of two for every 32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.weights.numbers import bf16_bits, bf16_values
from plait.weights.quantised.base import Fetch, Logical, powers_of_two, turned
from plait.weights.sources import TensorInfo

# The first scale with which a number can be infinite, 2 ** 126 * 6, and the exponent of such numbers.
_LARGE, _EXPONENT = 253, np.uint16(0x7F80)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([_E2M1, -_E2M1])


def _table() -> NDArray[np.uint32]:
    """Two bfloat16 numbers by scale and byte, [256 * 256], the low nibble's first: all are exact in bfloat16."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = bf16_bits(powers_of_two(np.arange(256, dtype=np.uint8))[:, None] * VALUES).astype("<u4")
    return (bits[:, None, :] | bits[:, :, None] << 16).reshape(-1)


class Mxfp4Weight(Logical):
    """blocks U8 [E, rows, groups, 16] and scales U8 [E, rows, groups] -> the weight [E, 32 * groups, rows].

    gpt-oss multiplies tokens by its experts' matrices from the left, so that its plain files have them as [E, in, out];
    the blocks run along `in`. The weight is shown as those plain files have it, in bfloat16.
    """

    origin = "MXFP4"

    def __init__(self, name: str, parts: Mapping[str, TensorInfo], fetch: Fetch) -> None:
        super().__init__(name, parts, fetch)
        self.need("blocks", "scales")
        shape = parts["blocks"].shape
        if len(shape) != 4 or shape[-1] != 16:
            raise self.error(
                f"{parts['blocks'].name!r} has shape {list(shape)}; [experts, rows, groups, 16] is expected"
            )
        self.expect("blocks", shape, ("U8",))
        self.expect("scales", shape[:-1], ("U8", "F8_E8M0"))

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.parts["blocks"].shape
        return (experts, 32 * groups, rows)

    @cached_property
    def format(self) -> str:
        return "BF16"

    @property
    def nbytes(self) -> int:
        return 2 * int(np.prod(self.shape, dtype=np.int64))

    def raw(self) -> NDArray[np.uint8]:
        return self._bits(0, self.shape[0]).view(np.uint8).reshape(-1)

    def numbers(self, start: int, stop: int) -> NDArray[np.float32]:
        return bf16_values(self._bits(start, stop))

    def _bits(self, start: int, stop: int) -> NDArray[np.uint16]:
        experts, rows, groups, _ = self.parts["blocks"].shape
        blocks = self._fetch(self.parts["blocks"].name).reshape(experts, rows, groups, 16)
        scales = self._fetch(self.parts["scales"].name).reshape(experts, rows, groups)
        table = _table()
        out = np.empty((stop - start, 32 * groups, rows), np.uint16)
        for expert in range(start, stop):
            index = scales[expert].astype(np.uint16)[..., None] << 8 | blocks[expert]
            bits = table[index].view("<u2").reshape(rows, 32 * groups)
            if scales[expert].max(initial=0) >= _LARGE and ((bits & _EXPONENT) == _EXPONENT).any():
                raise self.error(f"expert {expert} has numbers that are not finite: a scale of {scales[expert].max()}")
            out[expert - start] = turned(bits, np.uint16)
        return out
