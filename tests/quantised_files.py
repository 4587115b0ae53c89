"""Quantised Hugging Face checkpoints, packed from the formats' descriptions with Python's big integers, number by
number: nothing here shares a line with what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, torch.Tensor]


def words(values: Sequence[int], bits: int) -> list[int]:
    """Integers one after the other from the lowest bit up, cut into words of 32 bits."""
    total = 0
    for place, value in enumerate(values):
        assert 0 <= value < 1 << bits
        total |= value << place * bits
    return [total >> 32 * i & 0xFFFFFFFF for i in range(-(-len(values) * bits // 32))]


def int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32))


class Random:
    """Random integers, zero points and scales of a matrix; `weight()` is what they mean, in float32."""

    def __init__(
        self,
        rows: int,
        cols: int,
        group_size: int,
        bits: int = 4,
        symmetric: bool = True,
        order: bool = False,
        scale_dtype: torch.dtype = torch.float16,
        seed: int = 0,
        spread: float = 1.0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rows, self.cols, self.bits = rows, cols, bits
        self.group_size = cols if group_size == -1 else group_size
        self.groups = -(-cols // self.group_size)
        self.q = rng.integers(0, 1 << bits, (rows, cols))
        zeros = rng.integers(0, 1 << bits, (rows, self.groups))
        self.zeros = np.full_like(zeros, 1 << bits - 1) if symmetric else zeros
        level = spread / (1 << bits - 1)
        self.scales = torch.from_numpy(rng.uniform(0.2, 1.0, (rows, self.groups)) * level).to(scale_dtype)
        self.g_idx = np.arange(cols) // self.group_size
        if order:
            self.g_idx = rng.permutation(self.g_idx)

    def weight(self) -> np.ndarray:
        """One number after the other."""
        out = np.empty((self.rows, self.cols), np.float32)
        scales = self.scales.float().numpy()
        for r in range(self.rows):
            for c in range(self.cols):
                g = self.g_idx[c]
                out[r, c] = scales[r, g] * np.float32(int(self.q[r, c]) - int(self.zeros[r, g]))
        return out


def gptq(m: Random, v2: bool = False, with_order: bool = True) -> Parts:
    columns = [words(row.tolist(), m.bits) for row in m.q]
    if v2 or m.bits != 3:
        zeros = [words(m.zeros[:, g].tolist(), m.bits) for g in range(m.groups)]
        ones = 0 if v2 else words([1] * (32 // m.bits), m.bits)[0]
        zeros = [[word - ones & 0xFFFFFFFF for word in row] for row in zeros]
    else:
        zeros = [words([(int(z) - 1) % 8 for z in m.zeros[:, g]], 3) for g in range(m.groups)]
    parts = {"qweight": int32(columns).T.contiguous(), "qzeros": int32(zeros), "scales": m.scales.T.contiguous()}
    if with_order:
        parts["g_idx"] = torch.from_numpy(m.g_idx.astype(np.int32))
    return parts


def awq(m: Random) -> Parts:
    def pack(outputs: Sequence[int]) -> list[int]:
        return [
            sum(int(outputs[at + AWQ_ORDER[nibble]]) << 4 * nibble for nibble in range(8))
            for at in range(0, len(outputs), 8)
        ]

    return {
        "qweight": int32([pack(m.q[:, i]) for i in range(m.cols)]),
        "qzeros": int32([pack(m.zeros[:, g]) for g in range(m.groups)]),
        "scales": m.scales.T.contiguous(),
    }


def packed(m: Random, with_order: bool = False, store_zeros: bool = False) -> Parts:
    """compressed-tensors' "pack-quantized": q and zero points are stored as they are, from 0 up."""
    parts = {
        "weight_packed": int32([words(row.tolist(), m.bits) for row in m.q]),
        "weight_scale": m.scales.contiguous(),
        "weight_shape": torch.tensor([m.rows, m.cols]),
    }
    if store_zeros:
        columns = [words(m.zeros[:, g].tolist(), m.bits) for g in range(m.groups)]
        parts["weight_zero_point"] = int32(columns).T.contiguous()
    if with_order:
        parts["weight_g_idx"] = torch.from_numpy(m.g_idx.astype(np.int32))
    return parts


def integers(m: Random, store_zeros: bool = False) -> Parts:
    """compressed-tensors' "int-quantized": signed bytes."""
    parts = {"weight": torch.from_numpy((m.q - 128).astype(np.int8)), "weight_scale": m.scales.contiguous()}
    if store_zeros:
        parts["weight_zero_point"] = torch.from_numpy((m.zeros - 128).astype(np.int8))
    return parts


def fp8(
    rows: int, cols: int, block: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.0
) -> tuple[Parts, np.ndarray]:
    """FP8 numbers and scales by block, and what they mean in float32."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, cols, generator=generator) * 40).to(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    scale = ((torch.rand(grid, generator=generator) + 0.2) * spread / 40).to(dtype)
    values, out = weight.float().numpy(), np.empty((rows, cols), np.float32)
    for r in range(rows):
        for c in range(cols):
            out[r, c] = values[r, c] * np.float32(scale[r // block[0], c // block[1]].item())
    return {"weight": weight, "scale": scale}, out


# Whole models


Packer = Callable[[str, tuple[int, int], int], tuple[Parts, np.ndarray]]


def quantised_model(source: Path, target: Path, config: dict[str, Any], pack: Packer, dtype: torch.dtype) -> Path:
    """A directory whose linear layers are random quantised weights, and `target`-plain with the same numbers as F32.

    source: a saved model; of its tensors all matrices but the embedding, the head and routers are replaced. pack:
    (module, shape, seed) -> parts by suffix and their numbers. Other tensors are stored as dtype.
    """
    raw = json.loads((source / "config.json").read_text())
    stored: Parts = {}
    plain: Parts = {}
    for seed, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or "_proj" not in name:
            stored[name] = tensor.to(dtype)
            plain[name] = stored[name].float()
            continue
        parts, numbers = pack(module, (tensor.shape[0], tensor.shape[1]), seed)
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        plain[name] = torch.from_numpy(numbers)
    twin = target.with_name(target.name + "-plain")
    for folder, tensors, data in ((target, stored, {**raw, "quantization_config": config}), (twin, plain, raw)):
        folder.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(data))
    return target
