"""Numbers to the bytes of a storage type: plain floats, the simple blocks of GGUF and its K types. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.weights.gguf_types import TYPES_BY_NAME, row_bytes
from plait.weights.kquants import quantise_q4_k, quantise_q5_k, quantise_q6_k
from plait.weights.numbers import bf16_bits

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Numbers that one thread works on at a time.
_CHUNK_NUMBERS = 1 << 20
# The `gguf` package works on 16 rows at a time: longer rows spend the time in NumPy instead of between its calls.
_LONG_ROW = 1 << 13


def _simple(name: str) -> Callable[[Floats], Bytes]:
    def quantise(values: Floats) -> Bytes:
        import gguf

        kind = TYPES_BY_NAME[name]
        rows = values.reshape(-1, _LONG_ROW) if values.size % _LONG_ROW == 0 else values
        with np.errstate(all="ignore"):
            blocks = gguf.quantize(rows, gguf.GGMLQuantizationType(kind.id))
        return np.asarray(blocks).reshape(len(values), row_bytes(kind, values.shape[1]))

    return quantise


def _f32(values: Floats) -> Bytes:
    return np.ascontiguousarray(values, "<f4").view(np.uint8)


def _f16(values: Floats) -> Bytes:
    with np.errstate(over="ignore"):
        return values.astype("<f2").view(np.uint8)


def _bf16(values: Floats) -> Bytes:
    return bf16_bits(values).astype("<u2").view(np.uint8)


SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ENCODERS: Mapping[str, Callable[[Floats], Bytes]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    **{name: _simple(name) for name in SIMPLE},
    "Q4_K": quantise_q4_k,
    "Q5_K": quantise_q5_k,
    "Q6_K": quantise_q6_k,
}
# Where the fp16 scales of a block stand, in halves from its beginning.
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 1), "Q5_0": (0,), "Q5_1": (0, 1), "Q8_0": (0,)}
_SCALES |= {"Q4_K": (0, 1), "Q5_K": (0, 1), "Q6_K": (104,)}


def encode(
    read: Callable[[int, int], Floats], rows: int, columns: int, storage: str, name: str, threads: int = 1
) -> Bytes:
    """All rows of a tensor as `storage`, uint8 [rows, bytes of a row].

    read: (first, last + 1) -> these rows, float32 [n, columns]; called by `threads` threads, a few rows at a time.
    Raises WeightError, naming the tensor, for numbers that are not finite or that the type cannot hold.
    """
    kind = TYPES_BY_NAME[storage]
    out = np.empty((rows, row_bytes(kind, columns)), np.uint8)
    step = max(_CHUNK_NUMBERS // max(columns, 1), 1)

    def work(start: int) -> None:
        stop = min(start + step, rows)
        values = read(start, stop)
        if not np.isfinite(values).all():
            bad = values[~np.isfinite(values)][0]
            raise WeightError(f"tensor {name!r} holds {bad}, which {storage} cannot: the checkpoint is damaged")
        part = out[start:stop]
        part[...] = ENCODERS[storage](values)
        _check_range(part, storage, name)

    starts = range(0, rows, step)
    if threads == 1 or len(starts) == 1:
        for start in starts:
            work(start)
    else:
        with ThreadPoolExecutor(threads) as pool:  # NumPy works without the interpreter's lock
            for done in [pool.submit(work, start) for start in starts]:
                done.result()
    return out


def _check_range(part: Bytes, storage: str, name: str) -> None:
    """WeightError where a number or a block's scale became infinite."""
    if storage == "F16":
        finite = np.isfinite(part.view("<f2")).all()
    elif storage == "BF16":
        finite = ((part.view("<u2") & 0x7F80) != 0x7F80).all()
    elif storage in _SCALES:
        blocks = part.reshape(-1, TYPES_BY_NAME[storage].block_bytes)
        places = [slice(2 * half, 2 * half + 2) for half in _SCALES[storage]]
        finite = all(np.isfinite(np.ascontiguousarray(blocks[:, place]).view("<f2")).all() for place in places)
    else:
        return
    if not finite:
        raise WeightError(f"tensor {name!r} holds numbers too large for {storage}: choose BF16 or F32")
