"""Random adapters in peft's format, written without peft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.model.decoder import Decoder
from plait.model.families import family
from plait.model.record import record
from plait.weights.adapters import Adapter, linear_shapes, load_adapter
from plait.weights.mapping import BoundMap

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def modules_of(decoder: Decoder, endings: Sequence[str] = ALL) -> dict[str, tuple[int, int]]:
    """[O, I] of the file's modules whose names end so, as transformers calls them."""
    shapes = linear_shapes(record(decoder))
    bound = BoundMap(decoder.config, family(decoder.config.model_type).names)
    found = {}
    for assignment in bound.outgoing(list(shapes)):
        name = assignment.file.removesuffix(".weight")
        if name.endswith(tuple(endings)):
            parts = [shapes[part.name] for part in assignment.parts]
            found[name] = (sum(rows for rows, _ in parts), parts[0][1])
    return found


def adapter_tensors(
    modules: dict[str, tuple[int, int]], rank: int, seed: int = 0, size: float = 1.0
) -> dict[str, torch.Tensor]:
    """A and B of every module; `size`: of B A x against x, about."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in modules.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
        tensors[f"{PREFIX}{name}.lora_B.weight"] = size * torch.randn(rows, rank, generator=generator) / rank**0.5
    return tensors


def write_adapter(
    directory: Path,
    decoder: Decoder,
    *,
    endings: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """A directory with adapter_config.json (alpha = rank) and adapter_model.safetensors."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(endings),
        "bias": "none",
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(raw))
    tensors = adapter_tensors(modules_of(decoder, endings), rank, seed, size)
    save_file({k: v.to(dtype) for k, v in tensors.items()}, directory / "adapter_model.safetensors")
    return directory


def make_adapter(directory: Path, decoder: Decoder, name: str = "a", **options: Any) -> Adapter:
    """The same, loaded."""
    return load_adapter(write_adapter(directory / name, decoder, **options), decoder.config, record(decoder), name)


def ids_for(*numbers: int) -> np.ndarray:
    """adapter_ids of a step."""
    return np.array(numbers, np.int32)
