"""A GGUF file of a latent model whose kv_b lies in two tensors, seen as if it were one. No torch.

Converters since 2025 cut `attn_kv_b` [H (nope + v), r] in two: `attn_k_b` [H, r, nope], the rows that make each head's
keys, transposed, and `attn_v_b` [H, v, r]. Blocks of the one run across the rows of the other, so that what is
quantised is expanded to float32; the native plan keeps it as it keeps other quantised types without a kernel.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.model.config import LatentAttentionSpec, ModelConfig
from plait.weights.numbers import BYTES, bf16_bits, float32_rows
from plait.weights.sources import TensorInfo

if TYPE_CHECKING:
    import torch

_KEYS = re.compile(r"(blk\.(\d+)\.attn_)k_b\.weight")


def joined(source: Any, config: ModelConfig) -> Any:
    """The source itself where nothing is to be joined."""
    names = set(source.names())
    pairs: dict[str, tuple[str, str, LatentAttentionSpec]] = {}
    for name in source.names():
        found = _KEYS.fullmatch(name)
        if found is None or int(found[2]) >= len(config.layers):
            continue
        whole, values = f"{found[1]}kv_b.weight", f"{found[1]}v_b.weight"
        attention = config.layers[int(found[2])].attention
        if isinstance(attention, LatentAttentionSpec) and whole not in names and values in names:
            pairs[whole] = (name, values, attention)
    return JoinedSource(source, pairs) if pairs else source


class JoinedSource:
    """A TensorSource over another one, `stored`. pairs: a name that it adds -> those of keys and values, which it
    takes away."""

    def __init__(self, source: Any, pairs: dict[str, tuple[str, str, LatentAttentionSpec]]) -> None:
        self.path: Path = source.path
        self.metadata, self.file = source.metadata, source.file
        self.stored = self._source = source
        self._pairs = pairs
        self._whole = {pair[0]: whole for whole, pair in pairs.items()}
        self._gone = {pair[1] for pair in pairs.values()}

    def names(self) -> list[str]:
        return [self._whole.get(name, name) for name in self._source.names() if name not in self._gone]

    def info(self, name: str) -> TensorInfo:
        if name not in self._pairs:
            return self._source.info(name)
        keys, values, a = self._pairs[name]
        k, v = self._source.info(keys), self._source.info(values)
        self._check(k, (a.num_heads, a.latent_width, a.nope_width))
        self._check(v, (a.num_heads, a.value_width, a.latent_width))
        storage = k.format if k.format == v.format and k.format in ("F16", "BF16") else "F32"
        shape = (a.num_heads * (a.nope_width + a.value_width), a.latent_width)
        nbytes = shape[0] * shape[1] * (4 if storage == "F32" else 2)
        kinds = [kind for kind in dict.fromkeys((k.format, v.format)) if kind not in BYTES]
        origin = f"{' and '.join(kinds)} in two tensors" if kinds else ""
        return replace(k, name=name, shape=shape, format=storage, nbytes=nbytes, origin=origin)

    def is_of_blocks(self, name: str) -> bool:
        """Whether a tensor is joined of quantised blocks, or of these and BF16: numbers that BF16 is close enough to.
        Its bytes are float32 all the same."""
        parts = self._pairs[name][:2] if name in self._pairs else ()
        shorter = {self._source.info(part).format for part in parts} - {"BF16"}
        return bool(shorter) and not shorter & BYTES.keys()

    def _check(self, info: TensorInfo, shape: tuple[int, int, int]) -> None:
        """Heads may be an axis of their own or not."""
        heads, rows, columns = shape
        if info.shape not in (shape, (heads * rows, columns)):
            raise WeightError(f"{info.file}: {info.name} has shape {info.shape}; the configuration makes it {shape}")

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        if name not in self._pairs:
            return self._source.read(name, dtype)
        import torch

        info = self.info(name)
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.format]
        tensor = torch.from_numpy(self.raw(name)).view(kind).reshape(info.shape)
        return tensor if dtype is None else tensor.to(dtype)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """As of any source; of a joined tensor a copy."""
        if name not in self._pairs:
            return self._source.raw(name)
        storage, (keys, values, a) = self.info(name).format, self._pairs[name]
        k = float32_rows(self._source, keys).reshape(a.num_heads, a.latent_width, a.nope_width)
        v = float32_rows(self._source, values).reshape(a.num_heads, a.value_width, a.latent_width)
        whole = np.concatenate((k.transpose(0, 2, 1), v), axis=1)
        stored = bf16_bits(whole) if storage == "BF16" else whole.astype(np.float16 if storage == "F16" else np.float32)
        return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)

    def release(self, name: str) -> None:
        for part in self._pairs[name][:2] if name in self._pairs else (name,):
            self._source.release(part)

    def close(self) -> None:
        self._source.close()
