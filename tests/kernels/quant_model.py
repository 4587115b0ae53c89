"""What the native library's quantised products mean, in numpy: blocks of every format and records of activations.

Weights are judged by the gguf package's own dequantisation, never by the library's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import gguf
import numpy as np

from plait.kernels import abi, native

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Bytes of a block, and where in it the half-precision scales stand.
BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


def isa_names() -> list[str]:
    """The instruction sets that this machine runs, none without the native library."""
    library = native.native_library()
    names: list[str] = []
    while library is not None and (name := library.functions.plait_isa_name(len(names))) is not None:
        names.append(name.decode())
    return names


def random_blocks(rng: np.random.Generator, layout: str, rows: int, cols: int, fill: int | None = None) -> np.ndarray:
    """Rows of blocks as a file has them, uint8 [rows, bytes]: random bits (or bytes `fill`), finite scales."""
    block_cols, block_bytes, scales = BLOCKS[layout]
    blocks = rng.integers(0, 256, (rows, cols // block_cols, block_bytes), dtype=np.uint8)
    if fill is not None:
        blocks[:] = fill
    for offset in scales:
        values = (rng.standard_normal(blocks.shape[:2]) * 0.02).astype(np.float16)
        blocks[..., offset : offset + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantise(layout: str, blocks: np.ndarray) -> np.ndarray:
    """Values of rows of blocks by the gguf package, float32 [rows, cols]."""
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[layout])


@dataclass(frozen=True)
class Packed:
    """A packed matrix: the struct, and the memory it points to."""

    matrix: abi.Matrix
    data: np.ndarray

    @property
    def pointer(self) -> ctypes._Pointer:
        return ctypes.pointer(self.matrix)


def aligned(count_bytes: int) -> np.ndarray:
    """uint8 array on a 64-byte boundary, filled with 0xa5 so that what is not written shows."""
    memory = np.full(count_bytes + 64, 0xA5, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count_bytes]


def pack(
    source: np.ndarray, format: str, layout: str, cols: int, row_index: np.ndarray | None = None, threads: int = 1
) -> Packed:
    """`source` [rows, ...] (contiguous rows of blocks or numbers of storage `format`) packed as `layout`."""
    functions = native.native_library().functions
    rows = len(source) if row_index is None else len(row_index)
    count_bytes = functions.plait_packed_bytes(abi.LAYOUTS[layout], rows, cols)
    assert count_bytes > 0
    data = aligned(count_bytes + 64)
    status = functions.plait_pack(
        abi.LAYOUTS[format],
        abi.LAYOUTS[layout],
        source.ctypes.data,
        source.strides[0],
        None if row_index is None else row_index.ctypes.data,
        rows,
        cols,
        data.ctypes.data,
        threads,
    )
    assert status == 0, functions.plait_last_error()
    assert (data[count_bytes:] == 0xA5).all(), "written beyond the end"
    panels = -(-rows // abi.PANEL_ROWS)
    return Packed(abi.Matrix(abi.LAYOUTS[layout], 0, rows, cols, count_bytes // panels, data.ctypes.data), data)


def unpack(packed: Packed, ids: np.ndarray | None = None) -> np.ndarray:
    """Rows of a packed matrix as the library reads them, float32 [ids, cols]."""
    ids = np.arange(packed.matrix.rows, dtype=np.int32) if ids is None else ids.astype(np.int32)
    out = np.full((len(ids), packed.matrix.cols), np.nan, np.float32)
    functions = native.native_library().functions
    status = functions.plait_unpack_rows(packed.pointer, ids.ctypes.data, len(ids), out.ctypes.data, packed.matrix.cols)
    assert status == 0, functions.plait_last_error()
    return out


@dataclass(frozen=True)
class Records:
    """Quantised rows: the bytes as the library keeps them, and their parts as views."""

    data: np.ndarray  # uint8 [rows, row bytes]
    cols: int

    @property
    def quants(self) -> np.ndarray:
        """int8 [rows, cols]."""
        return self.data[:, : self.cols].view(np.int8)

    @property
    def scales(self) -> np.ndarray:
        """float32 [rows, cols / 32]."""
        return self.data[:, self.cols : self.cols + self.cols // 8].view(np.float32)

    @property
    def sums(self) -> np.ndarray:
        """float32 [rows, cols / 16]."""
        start = self.cols + self.cols // 8
        return self.data[:, start : start + self.cols // 4].view(np.float32)

    def values(self) -> np.ndarray:
        """The numbers that the records stand for, float64 [rows, cols]."""
        return self.quants.astype(np.float64) * np.repeat(self.scales.astype(np.float64), 32, axis=1)


def empty_records(rows: int, cols: int) -> Records:
    row_bytes = native.native_library().functions.plait_quantised_row_bytes(cols)
    return Records(aligned(rows * row_bytes).reshape(rows, row_bytes), cols)


def records_of(quants: np.ndarray, scales: np.ndarray) -> Records:
    """Records of given quants (int8 [rows, cols]) and scales (float32 [rows, cols / 32]), by numpy alone."""
    records = empty_records(*quants.shape)
    records.quants[:] = quants
    records.scales[:] = scales
    halves = quants.reshape(len(quants), -1, 16).astype(np.int32).sum(axis=2).astype(np.float32)
    records.sums[:] = halves * np.repeat(scales, 2, axis=1)
    return records


def quantise(x: np.ndarray) -> Records:
    """Rows of floats as the header defines their records, by numpy alone."""
    blocks = x.reshape(len(x), -1, 32)
    highest = np.abs(blocks).max(axis=2)
    with np.errstate(divide="ignore"):
        inverse = np.where(highest > 0, np.float32(127) / highest, np.float32(0))
    quants = np.rint(blocks * inverse[..., None]).astype(np.int8).reshape(x.shape)
    return records_of(quants, (highest / np.float32(127)).astype(np.float32))


def native_quantise(isa: str, x: np.ndarray) -> Records:
    """The same by the library."""
    records = empty_records(*x.shape)
    functions = native.native_library().functions
    status = functions.plait_quantise(
        isa.encode(), x.ctypes.data, x.strides[0] // 4, len(x), x.shape[1], records.data.ctypes.data
    )
    assert status == 0, functions.plait_last_error()
    return records


def matmul(
    isa: str,
    packed: Packed,
    x: np.ndarray,
    bias: np.ndarray | None = None,
    add: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The library's product with rows x (records' bytes, or floats), float32 [tokens, rows].

    out: where to put it, of any row stride; else memory of its own, with a margin that must stay untouched.
    """
    rows = packed.matrix.rows
    margin = np.full((len(x), rows + 17), np.float32(-7.25), np.float32)
    target = margin[:, :rows] if out is None else out
    functions = native.native_library().functions
    status = functions.plait_matmul(
        isa.encode(),
        packed.pointer,
        x.ctypes.data,
        x.strides[0],
        len(x),
        target.ctypes.data,
        target.strides[0] // 4,
        None if bias is None else bias.ctypes.data,
        None if add is None else add.ctypes.data,
        0 if add is None else add.strides[0] // 4,
    )
    assert status == 0, functions.plait_last_error()
    assert (margin[:, rows:] == np.float32(-7.25)).all(), "written beyond the last row"
    return target


def assert_product(got: np.ndarray, weights: np.ndarray, x: np.ndarray, base: np.ndarray | float = 0.0) -> None:
    """`got` [tokens, rows] equals x [tokens, cols] times weights [rows, cols] plus base, to float32's rounding.

    The error allowed is 1e-5 of the sum of the terms' magnitudes.
    """
    weights, x = weights.astype(np.float64), x.astype(np.float64)
    expected = x @ weights.T + base
    allowed = 1e-5 * (np.abs(x) @ np.abs(weights).T + np.abs(base)) + 1e-30
    worst = np.max(np.abs(got - expected) / allowed)
    assert worst <= 1, f"error is {worst} of what is allowed"
