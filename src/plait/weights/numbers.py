"""The numbers of stored tensors as float32 arrays, a few rows at a time. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.weights.gguf_types import TYPES_BY_NAME, expand_blocks, row_bytes
from plait.weights.sources import TensorInfo, TensorSource

# Formats that NumPy reads as they are. BF16 is the upper half of a float32.
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"} | {
    f"{kind}{bits}": f"<{code}{bits // 8}" for kind, code in (("I", "i"), ("U", "u")) for bits in (8, 16, 32, 64)
}
# Bytes of a number of the formats that need no expanding.
BYTES = {"BF16": 2} | {name: np.dtype(code).itemsize for name, code in _NUMPY.items()}


def stored_row_bytes(info: TensorInfo) -> int:
    """Bytes of one row (all axes but the first) of a stored tensor; of one number where it has one axis."""
    numbers = int(np.prod(info.shape[1:], dtype=np.int64))
    if info.format in BYTES:
        return numbers * BYTES[info.format]
    kind = _block_type(info)
    if numbers % kind.block_size:
        raise WeightError(f"{info.file}: tensor {info.name!r}: {kind.name} blocks do not divide {numbers} numbers")
    return row_bytes(kind, numbers)


def float32_rows(source: TensorSource, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
    """Rows start .. stop - 1 (axis 0) of a tensor, rounded to float32 where it holds more; quantised ones expanded by
    the `gguf` package's arithmetic, or by the source's own. Raises WeightError for a type that cannot be expanded."""
    computed = getattr(source, "numbers", None)
    if computed is not None:
        shape = source.info(name).shape
        values: NDArray[np.float32] = computed(name, start, (shape[0] if shape else 0) if stop is None else stop)
        return values
    info, raw = source.info(name), source.raw(name)
    if not info.shape:
        return _plain(raw, info.format).reshape(())
    stop = info.shape[0] if stop is None else stop
    shape = (stop - start, *info.shape[1:])
    if len(info.shape) == 1 and info.format not in BYTES:  # blocks run along the only axis
        return _expanded(raw, info, info.shape)[start:stop]
    size = stored_row_bytes(info)
    part = raw[start * size : stop * size]
    return _plain(part, info.format).reshape(shape) if info.format in BYTES else _expanded(part, info, shape)


def expand_rows(lines: NDArray[np.uint8], storage: str, columns: int) -> NDArray[np.float32]:
    """uint8 [rows, bytes of a row], stored as `storage` -> float32 [rows, columns]."""
    if storage in BYTES:
        return _plain(lines.reshape(-1), storage).reshape(-1, columns)
    out = np.empty((len(lines), columns), np.float32)
    flat = out.reshape(-1)
    for first, values in expand_blocks(np.ascontiguousarray(lines).reshape(-1), TYPES_BY_NAME[storage]):
        flat[first : first + values.size] = values
    return out


def rounded(values: NDArray[np.float32], storage: str) -> NDArray[np.float32]:
    """Float32 values rounded (to nearest even) to what F16 or BF16 can hold; unchanged for any other format."""
    if storage == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if storage == "BF16":
        return bf16_values(bf16_bits(values))
    return values


def bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 -> the bits of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), even)


def _plain(raw: NDArray[np.uint8], storage: str) -> NDArray[np.float32]:
    raw = np.ascontiguousarray(raw)
    if storage == "BF16":
        return bf16_values(raw.view("<u2"))
    with np.errstate(over="ignore"):
        return raw.view(_NUMPY[storage]).astype(np.float32)


def _expanded(raw: NDArray[np.uint8], info: TensorInfo, shape: tuple[int, ...]) -> NDArray[np.float32]:
    out = np.empty(shape, np.float32)
    flat = out.reshape(-1)
    for first, values in expand_blocks(raw, _block_type(info)):
        flat[first : first + values.size] = values
    return out


def _block_type(info: TensorInfo) -> Any:
    kind = TYPES_BY_NAME.get(info.format)
    if kind is None:
        raise WeightError(f"{info.file}: tensor {info.name!r} is stored as {info.format}, which cannot be expanded")
    if not kind.readable:
        raise WeightError(
            f"{info.file}: tensor {info.name!r} has type {kind.name} (id {kind.id}), which cannot be expanded:"
            " quantise the model to another type"
        )
    return kind
