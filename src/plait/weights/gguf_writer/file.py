"""A GGUF file through the `gguf` package's writer: metadata first, then one tensor at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.weights.gguf_types import TYPES_BY_NAME
from plait.weights.rows import tensor_bytes


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write. data: its bytes, uint8, called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    storage: str
    data: Callable[[], NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.shape, self.storage)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[FileTensor],
    done: Callable[[FileTensor], None] = lambda tensor: None,
) -> None:
    """Write a GGUF v3 file. metadata: Python values, with general.architecture; ints become uint32 where they fit, else
    int64; a pair (name of a GGUFValueType, value) has the type that it names. done: called after each tensor."""
    import gguf

    writer = _writer(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType(TYPES_BY_NAME[tensor.storage].id)
        # A dtype that is no uint8: the shape is the tensor's own, not that of its bytes.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float16), tensor.nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(np.ascontiguousarray(tensor.data()).reshape(-1))
            done(tensor)
        writer.flush()
    finally:
        writer.close()


def _writer(path: Path, architecture: str) -> Any:
    """The package's writer, which refuses arrays of nothing (the merges of a tokenizer of single bytes)."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
            if vtype is gguf.GGUFValueType.ARRAY and sub_type is not None and not val:
                return struct.pack("<I", vtype) * add_vtype + struct.pack("<IQ", sub_type, 0)
            packed: bytes = super()._pack_val(val, vtype, add_vtype, sub_type)
            return packed

    return Writer(path, architecture)


def _add(writer: Any, key: str, value: Any) -> None:
    import gguf

    kinds = gguf.GGUFValueType
    if isinstance(value, tuple):
        kind, stored = value
        name, _, element = kind.partition(":")
        writer.add_key_value(key, stored, kinds[name], kinds[element] if element else None)
    elif isinstance(value, bool):
        writer.add_key_value(key, value, kinds.BOOL)
    elif isinstance(value, int):
        writer.add_key_value(key, value, kinds.UINT32 if 0 <= value < 1 << 32 else kinds.INT64)
    elif isinstance(value, float):
        writer.add_key_value(key, value, kinds.FLOAT32)
    elif isinstance(value, str):
        writer.add_key_value(key, value, kinds.STRING)
    else:
        writer.add_array(key, value)
