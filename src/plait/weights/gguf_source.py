"""Tensors of a GGUF model as torch tensors, expanded while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.weights.gguf_header import Metadata
from plait.weights.gguf_reader import GGUFFile
from plait.weights.gguf_types import PLAIN_TYPES, TYPES_BY_NAME, expand_blocks
from plait.weights.sources import TensorInfo, no_such_tensor

if TYPE_CHECKING:
    import torch


class GGUFSource:
    """TensorSource over a GGUF file or split set; names and row order are the file's own (nothing is permuted back)."""

    def __init__(self, path: str | Path) -> None:
        self.file = GGUFFile(path)
        self.path = self.file.path

    @property
    def metadata(self) -> Metadata:
        """The file's key/value pairs."""
        return self.file.metadata

    def names(self) -> list[str]:
        return list(self.file.tensors)

    def info(self, name: str) -> TensorInfo:
        info = self.file.tensors.get(name)
        if info is None:
            raise no_such_tensor(name, self.path, self.names())
        return info

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, expanded; dtype None: the stored type for plain numbers, float32 for quantised ones.

        Quantised values are computed in float32 and then rounded to `dtype`; besides the result only a few megabytes
        are needed.
        """
        import torch

        info = self.info(name)
        raw = self.file.raw(name)
        plain = PLAIN_TYPES.get(info.format)
        if plain is not None:
            # Through bytes: NumPy has no bfloat16, and the bits must not change.
            out = torch.empty(info.shape, dtype=getattr(torch, plain))
            out.reshape(-1).view(torch.uint8).numpy()[:] = raw
            return out if dtype is None else out.to(dtype)
        kind = TYPES_BY_NAME[info.format]
        if not kind.readable:
            raise WeightError(
                f"{info.file}: tensor {name!r} has type {kind.name} (id {kind.id}), which cannot be expanded:"
                " quantise the model to another type"
            )
        out = torch.empty(info.shape, dtype=dtype or torch.float32)
        flat = out.reshape(-1)
        for first, values in expand_blocks(raw, kind):
            flat[first : first + values.size] = torch.from_numpy(values)
        return out

    def raw(self, name: str) -> NDArray[np.uint8]:
        return self.file.raw(name)

    def release(self, name: str) -> None:
        self.file.release(name)

    def close(self) -> None:
        self.file.close()
