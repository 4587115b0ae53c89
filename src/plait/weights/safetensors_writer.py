"""Writes safetensors files, one tensor at a time: the sizes are known before the numbers are. No torch.

Layout: the header's length as uint64, the header as JSON padded with spaces to a multiple of 8, the tensors' bytes one
after the other, those of the widest numbers first: every number then lies at a multiple of its width.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from plait.weights.gguf_writer.file import FileTensor
from plait.weights.numbers import BYTES

_METADATA = {"format": "pt"}


def write_safetensors(
    path: Path, tensors: Sequence[FileTensor], done: Callable[[FileTensor], None] = lambda tensor: None
) -> None:
    """Write one file of plain tensors (storage "F64", "F32", "F16" or "BF16"). done: called after each."""
    tensors = sorted(tensors, key=lambda tensor: -BYTES[tensor.storage])
    header: dict[str, object] = {"__metadata__": _METADATA}
    place = 0
    for tensor in tensors:
        offsets = [place, place + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.storage, "shape": list(tensor.shape), "data_offsets": offsets}
        place = offsets[1]
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            data = tensor.data()
            assert data.nbytes == tensor.nbytes, tensor.name
            file.write(data.reshape(-1).data)
            done(tensor)
