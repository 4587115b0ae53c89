"""A Hugging Face directory from any checkpoint, one tensor at a time: config.json, shards, tokenizer. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.model.config import ModelConfig, keeps_float32
from plait.model.families import family
from plait.weights.gguf_writer.file import FileTensor
from plait.weights.gguf_writer.model import encoded
from plait.weights.hf_files import (
    config_to_write,
    divisors_note,
    set_dtype,
    shard_files,
    write_generation_config,
    write_json,
    write_tokenizer,
)
from plait.weights.original_config import DTYPES_KEY, GENERATION_KEY
from plait.weights.rows import Outgoing, OutTensor, Parameters, turned
from plait.weights.safetensors_writer import write_safetensors
from plait.weights.transposed import matches, turned_shape

_STORAGE = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass
class DirectoryContents:
    """What a directory will hold. fixed_dtype: whether config.json keeps what it says about the dtype. expanded:
    quantised tensors by type; copied: tensors whose bytes are the source's own."""

    config: ModelConfig
    raw: dict[str, Any]
    tensors: list[FileTensor] = field(default_factory=list)
    copied: int = 0
    expanded: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)  # nothing: a directory has plain numbers
    notes: list[str] = field(default_factory=list)


def directory_contents(
    config: ModelConfig, parameters: Parameters, dtype: str | None, recorded: Mapping[str, Any], threads: int
) -> DirectoryContents:
    """The tensors under the names of the family's Hugging Face files.

    dtype: "bf16", "fp16", "fp32" for all of them but a router's, which stay float32; None: what the metadata of a GGUF
    file of ours (recorded) says of the original, else as they are stored, quantised ones as float32.
    """
    names = family(config.model_type).names
    outgoing = Outgoing(parameters, config, names)
    contents = DirectoryContents(config, config_to_write(config), notes=divisors_note(config))
    original = _original_dtypes(recorded) if dtype is None else None
    sizes: Counter[str] = Counter()
    rounded: set[str] = set()
    for tensor in outgoing:
        storage = _storage(tensor, original) if dtype is None else _STORAGE[dtype]
        if dtype is not None and all(keeps_float32(part.name) for part in tensor.assignment.parts):
            storage = "F32"
        turn = matches(names.transposed, tensor.name)

        def data(tensor: OutTensor = tensor, storage: str = storage, turn: bool = turn) -> NDArray[np.uint8]:
            rows = outgoing.read(tensor)
            return encoded(turned(rows) if turn else rows, storage, tensor.name, threads)

        shape = turned_shape(tensor.shape) if turn else tensor.shape
        contents.tensors.append(FileTensor(tensor.name, shape, storage, data))
        contents.copied += tensor.is_copied(storage) and not turn
        quantised = [kind for kind in tensor.stored if kind not in _DTYPES]
        contents.expanded.update(quantised)
        if quantised and storage not in ("F32", tensor.storage):
            rounded.add(_DTYPES[storage])
        sizes[storage] += contents.tensors[-1].nbytes
    main = max(sizes, key=lambda name: sizes[name])
    if original is None or original[0] not in _DTYPES:
        set_dtype(contents.raw, _DTYPES[main])
    if rounded:
        kinds = " and ".join(sorted(rounded))
        contents.notes.append(f"quantised tensors are rounded to {kinds}; --dtype fp32 keeps every digit")
    return contents


def write_directory(
    contents: DirectoryContents,
    directory: Path,
    source: Path | None,
    recorded: Mapping[str, Any],
    *,
    shard_bytes: int,
    tokenizer: bool = True,
    done: Callable[[FileTensor], None] = lambda tensor: None,
) -> None:
    """Fill an existing, empty directory. source: whose tokenizer it gets."""
    _write_weights(contents.tensors, directory, shard_bytes, done)
    ends = write_tokenizer(source, directory) if tokenizer else set()
    generation = recorded.get(GENERATION_KEY)
    if isinstance(generation, str) and not (directory / "generation_config.json").exists():
        data = _object(generation)
        if data:
            write_json(directory / "generation_config.json", data)
    write_generation_config(contents.config, directory, sorted(ends | set(contents.config.eos_token_ids)))
    write_json(directory / "config.json", contents.raw)


def _storage(tensor: OutTensor, original: tuple[str, Mapping[str, str]] | None) -> str:
    if original is not None:
        default, others = original
        found = others.get(tensor.name, default)
        if found in _DTYPES:
            return found
    # float32 is the widest that is computed; wider numbers are only copied.
    keeps = tensor.storage in _DTYPES and (tensor.storage != "F64" or tensor.is_copied("F64"))
    return tensor.storage if keeps else "F32"


def _original_dtypes(recorded: Mapping[str, Any]) -> tuple[str, Mapping[str, str]] | None:
    """The storage of the original's tensors: of most, and of the others by name."""
    data = _object(recorded.get(DTYPES_KEY))
    others = data.get("others")
    if data.get("default") not in _DTYPES or not isinstance(others, dict):
        return None
    return data["default"], others


def _object(text: Any) -> dict[str, Any]:
    """The JSON object of a text that a file brought; {} where it is none."""
    try:
        data = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _write_weights(
    tensors: Sequence[FileTensor], directory: Path, shard_bytes: int, done: Callable[[FileTensor], None]
) -> None:
    """model.safetensors, or numbered shards with an index where the weights exceed `shard_bytes`."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for file, names in shard_files(directory, [(tensor.name, tensor.nbytes) for tensor in tensors], shard_bytes):
        write_safetensors(file, [by_name[name] for name in names], done)
