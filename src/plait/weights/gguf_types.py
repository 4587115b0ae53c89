"""The storage types of GGUF tensors: their block table and how they become numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from plait.errors import WeightError

if TYPE_CHECKING:
    import numpy as np


class BlockType(NamedTuple):
    """A storage type: its id in files, numbers per block, bytes per block, and whether it can become numbers here."""

    name: str
    id: int
    block_size: int
    block_bytes: int
    readable: bool = True


# ids and sizes: the ggml_type enumeration and block structures of ggml; a test compares with the gguf package.
_TYPES = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    BlockType("Q8_1", 9, 32, 40, readable=False),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
    BlockType("Q8_K", 15, 256, 292, readable=False),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    BlockType("IQ4_NL", 20, 32, 18),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockType("IQ4_XS", 23, 256, 136),
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    BlockType("I32", 26, 1, 4),
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
    BlockType("IQ1_M", 29, 256, 56),
    BlockType("BF16", 30, 1, 2),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17),
    BlockType("NVFP4", 40, 64, 36),
    BlockType("Q1_0", 41, 128, 18, readable=False),
)
TYPES_BY_ID = {kind.id: kind for kind in _TYPES}
TYPES_BY_NAME = {kind.name: kind for kind in _TYPES}

# Types that are plain arrays of numbers: the torch type that holds them without conversion.
PLAIN_TYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}

_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}

_CHUNK_NUMBERS = 1 << 20
_ROW_NUMBERS = 1 << 13


def type_by_id(type_id: int, tensor: str, path: object) -> BlockType:
    """The table row of a type id; WeightError naming tensor and id when there is none."""
    kind = TYPES_BY_ID.get(type_id)
    if kind is not None:
        return kind
    if type_id in _REMOVED:
        raise WeightError(
            f"{path}: tensor {tensor!r} has type id {type_id} ({_REMOVED[type_id]}), which was removed from the"
            " format: quantise the model again"
        )
    raise WeightError(f"{path}: tensor {tensor!r} has the unknown type id {type_id}")


def row_bytes(kind: BlockType, row: int) -> int:
    """Bytes of a row of `row` numbers, which the block size must divide."""
    return row // kind.block_size * kind.block_bytes


def expand_blocks(raw: np.ndarray, kind: BlockType) -> Iterator[tuple[int, np.ndarray]]:
    """Expand quantised blocks a few at a time, so that peak memory stays a few megabytes above the result's.

    raw: [bytes] uint8, whole blocks. Yields (index of the first number, values [n] float32), in order. The arithmetic
    is the `gguf` package's; non-finite scales give non-finite values.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    blocks = raw.reshape(-1, kind.block_bytes)
    # The package works on 16 rows at a time. Blocks do not know their row, so rows may be regrouped: long ones spend
    # the time in NumPy instead of between its calls.
    per_row = _ROW_NUMBERS // kind.block_size
    step = _CHUNK_NUMBERS // kind.block_size
    even = blocks.shape[0] // per_row * per_row
    bounds = [*range(0, even, step), even, *([blocks.shape[0]] if even < blocks.shape[0] else [])]
    for first, end in pairwise(bounds):
        rows = blocks[first:end].reshape(-1, kind.block_bytes * (per_row if end <= even else 1))
        with np.errstate(all="ignore"):
            values = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType(kind.id))
        yield first * kind.block_size, values.reshape(-1)
