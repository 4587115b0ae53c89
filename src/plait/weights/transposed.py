"""A checkpoint some of whose matrices, or stacks of them, are stored as [in, out], seen as if they were [out, in]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.weights.sources import TensorInfo, TensorSource

if TYPE_CHECKING:
    import torch

_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.uint16, "BF16": np.uint16}


def matches(patterns: Sequence[str], name: str) -> bool:
    """Whether one of the regular expressions is the whole of a tensor's name in a file."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def turned_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix, or of a stack of them, with its last two axes exchanged."""
    return (*shape[:-2], *shape[:-3:-1])


class TransposedSource:
    """A TensorSource over another one. patterns: regular expressions of the names that are turned."""

    def __init__(self, source: TensorSource, patterns: Sequence[str]) -> None:
        self.path: Path = source.path
        self._source = source
        self._turned = {name for name in source.names() if matches(patterns, name)}

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        return replace(info, shape=turned_shape(info.shape)) if name in self._turned else info

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._source.read(name, dtype)
        return tensor.mT.contiguous() if name in self._turned else tensor

    def raw(self, name: str) -> NDArray[np.uint8]:
        """As of any source; of a turned tensor a copy."""
        raw = self._source.raw(name)
        if name not in self._turned:
            return raw
        info = self._source.info(name)
        if info.format not in _TYPES:
            raise WeightError(f"{info.file}: {name} is stored as {info.format}, which cannot be transposed")
        stored = raw.view(_TYPES[info.format]).reshape(info.shape)
        return np.ascontiguousarray(stored.swapaxes(-1, -2)).view(np.uint8).reshape(-1)

    def release(self, name: str) -> None:
        self._source.release(name)

    def close(self) -> None:
        self._source.close()
