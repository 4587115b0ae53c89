"""Fills packed weights, or parts of a stack of experts, from rows as a file or a live parameter has them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.kernels import abi
from plait.model.name_map import Place
from plait.weights.store import PackedWeight, need_library


@dataclass(frozen=True)
class Source:
    """Rows `row_bytes` apart from `address` on, in the order `index` (None: as they lie). storage: a key of
    abi.LAYOUTS."""

    storage: str
    address: int
    row_bytes: int
    index: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class _Piece:
    """Rows of the source, first .. first + rows - 1, that fill bytes of a packed weight from `start` on."""

    first: int
    rows: int
    start: int


def fill(weight: PackedWeight, source: Source, place: Place | None, threads: int) -> None:
    """Pack what fills a weight, or (place) a part of a stack, into its bytes, with up to `threads` threads.

    Raises WeightError for a storage that cannot be packed so, or a place that begins or ends inside a panel.
    """
    pieces = list(_pieces(weight, place))
    if len(pieces) < threads or threads == 1:
        for piece in pieces:
            _pack(weight, source, piece, threads)
        return
    with ThreadPoolExecutor(threads) as pool:  # the library works without the interpreter's lock
        for done in [pool.submit(_pack, weight, source, piece, 1) for piece in pieces]:
            done.result()


def fill_vector(weight: PackedWeight, values: NDArray[np.float32], place: Place | None) -> None:
    """The same for a vector: values in the order of what they fill."""
    if place is None:
        target = weight.vector()
        target[...] = values.reshape(target.shape)
    else:
        target = place.of(weight.vector())
        target[...] = place.from_file(values.reshape(target.shape))


def _pieces(weight: PackedWeight, place: Place | None) -> Iterator[_Piece]:
    """A piece for every matrix of the weight that the place touches."""
    panel = weight.matrix().panel_bytes
    if len(weight.shape) == 2:
        yield _Piece(0, weight.shape[0], 0)
        return
    experts, rows, _ = weight.shape
    (e0, e1), (r0, r1) = ((0, experts), (0, rows)) if place is None else (place.experts, place.rows)
    size, panels = weight.part_rows, weight.padded_rows // abi.PANEL_ROWS
    first = 0
    for expert in range(e0, e1):
        for part in range(weight.parts):
            a, b = max(r0 - part * size, 0), min(r1 - part * size, size)
            if a >= b:
                continue
            if a % abi.PANEL_ROWS or (b % abi.PANEL_ROWS and b != size):
                raise WeightError(
                    f"{weight.name}: rows {r0} to {r1} of an expert begin or end inside a panel of {abi.PANEL_ROWS}"
                )
            matrix = expert * weight.parts + part
            yield _Piece(first, b - a, (matrix * panels + a // abi.PANEL_ROWS) * panel)
            first += b - a


def _pack(weight: PackedWeight, source: Source, piece: _Piece, threads: int) -> None:
    index = source.index
    address = source.address
    if index is None:
        address += piece.first * source.row_bytes
    else:
        index = np.ascontiguousarray(index[piece.first : piece.first + piece.rows], np.int64)
    status = need_library().functions.plait_pack(
        abi.LAYOUTS[source.storage],
        abi.LAYOUTS[weight.layout],
        address,
        source.row_bytes,
        None if index is None else index.ctypes.data,
        piece.rows,
        weight.shape[-1],
        weight.data.ctypes.data + piece.start,
        threads,
    )
    if status != 0:
        raise WeightError(
            f"{weight.name}: a matrix of shape {weight.shape} stored as {source.storage} cannot be packed as"
            f" {weight.layout}"
        )


def row_order(
    rows: NDArray[np.int64] | None, shape: tuple[int, ...], place: Place | None = None
) -> NDArray[np.int64] | None:
    """The order of a tensor's lines (all axes but the last) for an order of its first axis, or for a place's own."""
    if place is not None and place.order is not None:
        experts = place.experts[1] - place.experts[0]
        return (np.arange(experts)[:, None] * len(place.order) + place.order).reshape(-1)
    if rows is None:
        return None
    inner = prod(shape[1:-1])
    return (rows[:, None] * inner + np.arange(inner)).reshape(-1)
