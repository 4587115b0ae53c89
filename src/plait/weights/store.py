"""Weights as the native kernels read them: packed matrices and float32 vectors by parameter name. No torch.

A store replaces a decoder's parameters: names are the decoder's own (`model.layers.0.self_attn.q_proj.weight`, ...),
values are exactly the checkpoint's, the layout is that of csrc/plait_native.h. Two names may share one weight (a tied
head).

A stack of experts [E, R, C] is E * parts matrices of R / parts rows one after another, each padded to whole panels: the
kernels take every one for itself. Gate and up are two parts of one stack.

Latent attention's weights have a second layout beside them (plait.weights.latent), under `second_name`: no parameter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.kernels import abi
from plait.kernels.native import NativeLibrary, NativeLibraryError, native_library, reason

VECTOR = "VECTOR"
_ALIGNMENT = 64
# Rows unpacked at a time by `expand`: the ids and nothing else is held besides the result.
_EXPAND_ROWS = 4096


_SECOND = "#transposed_keys"


def second_name(name: str) -> str:
    """The name of a weight's second layout in a store."""
    return name + _SECOND


def is_second(name: str) -> bool:
    """Whether a store's name is that of a second layout, and no parameter's."""
    return name.endswith(_SECOND)


def need_library() -> NativeLibrary:
    """The native library; NativeLibraryError with the reason where there is none."""
    native = native_library()
    if native is None:
        raise NativeLibraryError(f"packed weights need the native library, which is not in use: {reason()}")
    return native


def packed_bytes(layout: str, shape: Sequence[int], parts: int = 1) -> int:
    """Bytes of a weight of this shape in a layout. WeightError where its columns do not divide into blocks."""
    if layout == VECTOR:
        return 4 * prod(shape)
    *stack, rows, cols = shape
    size = need_library().functions.plait_packed_bytes(abi.LAYOUTS[layout], rows // parts, cols)
    if size < 0 or rows % parts:
        raise WeightError(f"a matrix of shape {tuple(shape)} cannot be packed as {layout}")
    return int(size) * prod(stack) * parts


def stack_parts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Parts of each expert's rows, for every stack among parameters of these shapes: two where gate and up are one."""
    parts = {}
    for name, shape in shapes.items():
        if len(shape) == 3:
            down = shapes.get(name.removesuffix("gate_up_proj") + "down_proj", shape)
            parts[name] = shape[1] // down[2] if name.endswith("gate_up_proj") else 1
    return parts


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """uint8 [nbytes], uninitialised, beginning at a multiple of 64."""
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """One weight. shape: the parameter's, [rows, cols], [experts, rows, cols], or that of a vector; layout: a key of
    abi.LAYOUTS, or "VECTOR" (float32).

    data: uint8 [packed bytes], beginning at a multiple of 64; it may be pages of a file. parts: of a stack, matrices
    that the rows of each expert are kept as.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    data: NDArray[np.uint8]
    parts: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the packed numbers."""
        return int(self.data.nbytes)

    @property
    def part_rows(self) -> int:
        """Rows of each matrix that this weight consists of."""
        return self.shape[-2] // self.parts

    @property
    def padded_rows(self) -> int:
        """Rows from one matrix of a stack to the next."""
        return -(-self.part_rows // abi.PANEL_ROWS) * abi.PANEL_ROWS

    def matrix(self) -> abi.Matrix:
        """The descriptor for the library; a vector is one row, a stack one matrix with the padding between its parts
        (and behind the last). `data` must outlive it."""
        if self.layout == VECTOR:
            return abi.Matrix(abi.LAYOUT_VECTOR, 0, 1, prod(self.shape), self.nbytes, self.data.ctypes.data)
        if len(self.shape) == 2:
            rows, padded = self.shape[0], self.padded_rows
        else:
            rows = padded = self.shape[0] * self.parts * self.padded_rows
        panels = padded // abi.PANEL_ROWS
        panel_bytes = self.nbytes // panels if panels else 0
        return abi.Matrix(abi.LAYOUTS[self.layout], 0, rows, self.shape[-1], panel_bytes, self.data.ctypes.data)

    def vector(self) -> NDArray[np.float32]:
        """A vector's numbers in the parameter's shape, float32, a view."""
        if self.layout != VECTOR:
            raise WeightError(f"{self.name} is a matrix of layout {self.layout}, not a vector")
        return self.data.view(np.float32).reshape(self.shape)

    def rows(self, ids: NDArray[np.integer] | Sequence[int]) -> NDArray[np.float32]:
        """Rows of a matrix, float32 [len(ids), cols]; those of a stack are numbered through, expert by expert.

        WeightError for an id out of range.
        """
        wanted = np.asarray(ids, np.int64)
        count = prod(self.shape[:-1])
        out = np.empty((len(wanted), self.shape[-1]), np.float32)
        functions = need_library().functions
        matrix = self.matrix()
        in_range = not len(wanted) or (wanted.min() >= 0 and wanted.max() < count)
        # Where they lie: padding stands between the parts.
        lines = wanted // self.part_rows * self.padded_rows + wanted % self.part_rows
        places = np.ascontiguousarray(lines, np.int32)
        if not in_range or functions.plait_unpack_rows(
            ctypes.byref(matrix), places.ctypes.data, len(places), out.ctypes.data, out.shape[1]
        ):
            raise WeightError(f"{self.name}: a row out of range of {count}, or an unknown layout")
        return out

    def expand(self) -> NDArray[np.float32]:
        """All numbers in the parameter's shape, float32, a copy."""
        if self.layout == VECTOR:
            return self.vector().copy()
        out = np.empty(self.shape, np.float32)
        lines = out.reshape(-1, self.shape[-1])
        for first in range(0, len(lines), _EXPAND_ROWS):
            last = min(first + _EXPAND_ROWS, len(lines))
            lines[first:last] = self.rows(np.arange(first, last))
        return out


class WeightStore(Mapping[str, PackedWeight]):
    """Packed weights by parameter name. version: grows by one whenever numbers change (`renew`).

    report: what packing did, a plait.weights.arrange.LoadReport. owner: what keeps the memory of weights alive that are
    views (a mapped file).
    """

    def __init__(self, weights: Mapping[str, PackedWeight], report: Any = None, owner: Any = None) -> None:
        self._weights = dict(weights)
        self._owner = owner
        self.report = report
        self.version = 0

    def __getitem__(self, name: str) -> PackedWeight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; one that has two names counts once."""
        return sum(data.nbytes for data in {id(w.data): w.data for w in self._weights.values()}.values())

    @property
    def second_bytes(self) -> int:
        """Bytes of them that second layouts take."""
        return sum(weight.nbytes for name, weight in self._weights.items() if is_second(name))

    def expand(self, name: str) -> NDArray[np.float32]:
        """A weight's numbers in the parameter's shape, float32."""
        return self[name].expand()

    def layouts(self) -> dict[str, int]:
        """Matrices by layout, for people; vectors, second names and second layouts are not counted."""
        counts: dict[str, int] = {}
        for weight in {id(w.data): w for w in self._weights.values()}.values():
            if weight.layout != VECTOR and not is_second(weight.name):
                counts[weight.layout] = counts.get(weight.layout, 0) + 1
        return counts

    def add(self, weight: PackedWeight) -> None:
        """One weight more, under its own name."""
        self._weights[weight.name] = weight

    def renew(self) -> None:
        """The numbers in the standing buffers have changed."""
        self.version += 1
