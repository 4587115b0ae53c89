"""One weight that a file keeps as several tensors: what every format has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.weights.numbers import bf16_values
from plait.weights.sources import TensorInfo

# The stored bytes of a tensor.
Fetch = Callable[[str], NDArray[np.uint8]]

# Numbers expanded at a time: temporaries stay a few tens of megabytes beside the result.
CHUNK_NUMBERS = 1 << 22
_STRIP = 64
# A scale times the largest integer or FP8 number stays finite.
_LARGEST = 1e35

INTEGERS = ("I32",)
FLOATS = ("F16", "BF16", "F32")
_DTYPES = {
    "I64": "<i8",
    "I32": "<u4",  # packed words: their bits count, not their sign
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}


class Logical(ABC):
    """A weight as the name maps know it.

    parts: the stored tensors that it consists of, by role; the first is the one that holds the numbers. origin: the
    format, for people.
    """

    origin: str = ""

    def __init__(self, name: str, parts: Mapping[str, TensorInfo], fetch: Fetch) -> None:
        self.name = name
        self.parts = parts
        self._fetch = fetch

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the weight: known from the headers."""

    @cached_property
    @abstractmethod
    def format(self) -> str:
        """A layout that holds the numbers exactly ("Q4_0", ..., "BF16"), else the name of what must be expanded.

        May read scales and zero points. Raises WeightError where they are no numbers.
        """

    @abstractmethod
    def numbers(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start .. stop - 1 (axis 0), float32. Raises WeightError for what is no number."""

    def raw(self) -> NDArray[np.uint8]:
        """The bytes of `format` where that is a layout; else those of all parts, one after the other."""
        return np.concatenate([self._fetch(info.name).reshape(-1) for info in self.parts.values()])

    @property
    def nbytes(self) -> int:
        """Of `raw`."""
        return sum(info.nbytes for info in self.parts.values())

    def forget(self) -> None:
        """Give back what was read of scales and zero points; they can be read again all the same."""
        for name in ("_scales", "_all_scales", "_zeros", "_order"):
            self.__dict__.pop(name, None)

    def chunks(self, per_row: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows start .. stop - 1 of `per_row` numbers each, a few at a time."""
        step = max(CHUNK_NUMBERS // max(per_row, 1), 1)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def array(self, role: str) -> NDArray[Any]:
        """A stored part in its own shape and type, a view of the file (BF16 as float32, a copy)."""
        info = self.parts[role]
        data = self._fetch(info.name)
        if info.format == "BF16":
            return bf16_values(data.view("<u2")).reshape(info.shape)
        return data.view(_DTYPES[info.format]).reshape(info.shape)

    def floats(self, role: str) -> NDArray[np.float32]:
        """Scales as float32. Raises WeightError for what is not finite, or so large that a weight would not be."""
        info = self.parts[role]
        with np.errstate(over="ignore", invalid="ignore"):
            if info.format in ("F8_E8M0", "U8"):
                values = powers_of_two(self._fetch(info.name)).reshape(info.shape)
            else:
                values = self.array(role).astype(np.float32)
        bad = int(np.count_nonzero(~(np.abs(values) < _LARGEST)))
        if bad:
            raise self.error(f"{info.name!r} holds {bad} numbers that are not finite or exceed {_LARGEST:g}")
        return values

    def error(self, why: str) -> WeightError:
        """The error for this weight: file, its name, and what is wrong."""
        first = next(iter(self.parts.values()))
        return WeightError(f"{first.file}: {self.origin} weight {self.name!r}: {why}")

    def expect(self, role: str, shape: Sequence[int], formats: Sequence[str]) -> None:
        """WeightError unless a part has this shape and one of these types."""
        info = self.parts[role]
        if info.format not in formats:
            raise self.error(f"{info.name!r} is stored as {info.format}; {' or '.join(formats)} is expected")
        if tuple(info.shape) != tuple(shape):
            raise self.error(f"{info.name!r} has shape {list(info.shape)}; {list(shape)} is expected")

    def need(self, *roles: str) -> None:
        """WeightError unless all of these parts are there."""
        missing = [role for role in roles if role not in self.parts]
        if missing:
            first = next(iter(self.parts.values()))
            verb = "is" if len(missing) == 1 else "are"
            raise self.error(f"{first.name!r} is there, but its {' and '.join(missing)} {verb} missing")

    def dims(self, role: str, axes: int) -> tuple[int, ...]:
        """The shape of a part, which must have so many axes and no empty one."""
        info = self.parts[role]
        if len(info.shape) != axes or 0 in info.shape:
            raise self.error(
                f"{info.name!r} has shape {list(info.shape)}; {axes} axes are expected, none of them empty"
            )
        return info.shape


def turned(matrix: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """The transpose of a matrix as an array of its own; in strips, which is twice as fast for large ones."""
    out = np.empty(matrix.shape[::-1], dtype)
    for first in range(0, matrix.shape[0], _STRIP):
        out[:, first : first + _STRIP] = matrix[first : first + _STRIP].T
    return out


def powers_of_two(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """E8M0: 2 ** (e - 127), and NaN for 255."""
    with np.errstate(over="ignore"):
        powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), powers)
