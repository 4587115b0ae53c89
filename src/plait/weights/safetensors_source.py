"""Tensors of a safetensors file or sharded directory: read through the `safetensors` package, or as raw bytes."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError, WeightError
from plait.weights.safetensors_header import QUANTISED_DTYPES, check_not_shard, read_directory, read_header
from plait.weights.sources import TensorInfo, close_maps, map_file, no_such_tensor, release_pages

if TYPE_CHECKING:
    import torch


class SafetensorsSource:
    """TensorSource over a directory or one .safetensors file; all headers are checked when it opens."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors: dict[str, TensorInfo]
        if self.path.is_dir():
            self._tensors = read_directory(self.path)
        elif self.path.exists():
            check_not_shard(self.path)
            self._tensors = read_header(self.path)[0]
        else:
            raise UsageError(f"{self.path}: no such file or directory")
        self._files: dict[str, Any] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._closed = False

    def names(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise no_such_tensor(name, self.path, self.names())
        return info

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor; dtype None keeps the stored type. It may be a copy-on-write view of the mapped file."""
        info = self._readable(name)
        if info.format in QUANTISED_DTYPES:
            raise WeightError(
                f"{info.file}: tensor {name!r} is stored as {info.format}: it has no numbers of its own without the"
                " scales that a quantization_config in config.json describes"
            )
        tensor = self._open(info.file).get_tensor(name)
        return tensor if dtype is None else tensor.to(dtype)

    def raw(self, name: str) -> NDArray[np.uint8]:
        info = self._readable(name)
        if info.file not in self._maps:
            self._maps[info.file] = map_file(Path(info.file))
        return np.frombuffer(self._maps[info.file], np.uint8, info.nbytes, info.offset)

    def release(self, name: str) -> None:
        info = self.info(name)
        if info.file in self._maps:
            release_pages(self._maps[info.file], info.offset, info.nbytes)

    def _readable(self, name: str) -> TensorInfo:
        info = self.info(name)
        if self._closed:
            raise WeightError(f"{self.path}: already closed")
        return info

    def _open(self, file: str) -> Any:
        if file not in self._files:
            from safetensors import SafetensorError, safe_open

            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{file}: {error}") from None
        return self._files[file]

    def close(self) -> None:
        self._files.clear()
        close_maps(self._maps)
        self._closed = True
