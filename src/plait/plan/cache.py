"""Packed weights and the recording on disk (plait.cachefile), keyed by the checkpoint's files and the code that reads
them. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import plait
from plait import cachefile
from plait.errors import PlaitError
from plait.kernels.abi import ABI_VERSION
from plait.ops.recording import FORMAT
from plait.weights.arrange import LoadReport
from plait.weights.pack import Packing
from plait.weights.store import PackedWeight, WeightStore, packed_bytes

KIND = "plan"
# Of what an entry holds beside the weights. To be raised when its meaning changes.
VERSION = 3
# Parts of the package that decide what an entry holds: a changed one makes all entries old.
_CODE = ("model", "model/families", "memory", "ops", "plan", "text", "weights")
# Files beside the tensors that decide what a model directory means.
_BESIDE = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "merges.txt")


@dataclass(frozen=True)
class CachedModel:
    """What an entry gave. facts: as they were written; store: its weights are pages of the file."""

    facts: dict[str, Any]
    store: WeightStore


def key(path: Path, dtype: str, config: str = "") -> dict[str, Any] | None:
    """What an entry must have been written under to be used for these files now; None where they cannot be read.

    config: a digest of the configuration where it is not simply the files' own.
    """
    try:
        files = cachefile.identity(model_files(path))
    except OSError:
        return None
    return {
        "kind": KIND,
        "plait": plait.__version__,
        "code": code_digest(),
        "abi": ABI_VERSION,
        "version": VERSION,
        "recording": FORMAT,
        "dtype": dtype,
        "config": config,
        "files": files,
    }


@cache
def code_digest() -> str:
    """A digest of the sources of what makes an entry, "" where they are not there as files.

    Of their sizes and times of change: reading all of them would take as long as mapping a small model.
    """
    root = Path(__file__).resolve().parents[1]
    found = []
    try:
        for part in _CODE:
            with os.scandir(root / part) as files:
                for file in files:
                    if file.name.endswith((".py", ".json")):
                        status = file.stat()
                        found.append((part, file.name, status.st_size, status.st_mtime_ns))
    except OSError:
        return ""
    return hashlib.blake2b(repr(sorted(found)).encode(), digest_size=16).hexdigest()


def model_files(path: Path) -> list[Path]:
    """Every file that a checkpoint consists of, or that decides how it is read."""
    if path.is_dir() or path.suffix == ".safetensors":
        folder = path if path.is_dir() else path.parent
        tensors = sorted(folder.glob("*.safetensors")) if path.is_dir() else [path]
        return tensors + sorted(file for pattern in _BESIDE for file in folder.glob(pattern))
    from plait.weights.gguf_reader import split_members

    return split_members(path)


def read(path: Path, dtype: str, key: Mapping[str, Any]) -> CachedModel | None:
    """The packed form of a checkpoint, if an entry for these very files is there and whole."""
    name = entry_name(path, dtype, key)
    entry = cachefile.read(name, key)
    if entry is None:
        return None
    try:
        return _decode(entry)
    except (PlaitError, ValueError, KeyError, TypeError, AttributeError) as error:
        say_unfit(name, error)
        return None


def say_unfit(name: str, error: Exception) -> None:
    """Tell that an entry holds something else than this version expects."""
    folder = cachefile.directory()
    assert folder is not None
    why = f"it holds something unexpected ({type(error).__name__}: {error})"
    cachefile.say_unreadable(folder / name, cachefile.CacheError(why))


def _decode(entry: cachefile.Entry) -> CachedModel:
    facts = dict(entry.facts)
    weights = {}
    for name, shape, layout, parts in facts.pop("weights"):
        data = entry.arrays[name]
        if parts < 1 or packed_bytes(layout, shape, parts) != data.nbytes:
            raise ValueError(f"{name} has {data.nbytes} bytes")
        weights[name] = PackedWeight(name, tuple(shape), layout, data, parts)
    return CachedModel(facts, WeightStore(weights, LoadReport(**facts.pop("report")), owner=entry))


def write(
    packing: Packing, dtype: str, threads: int | None, key: Mapping[str, Any], facts: Mapping[str, Any]
) -> WeightStore:
    """Pack into a new entry, one weight at a time, and map it. Raises OSError where that is not possible."""
    path = packing.checkpoint.path
    table = []
    with cachefile.Writer(entry_name(path, dtype, key), packing.report.weight_bytes) as writer:
        for weight in packing.weights(threads):
            writer.add(weight.name, weight.data)
            table.append([weight.name, weight.shape, weight.layout, weight.parts])
        report = asdict(packing.report) | {"seconds": 0.0}
        writer.commit(key, {**facts, "weights": table, "report": report})
    found = read(path, dtype, key)
    if found is None:
        raise OSError("an entry that was just written is gone or damaged")
    return found.store


def entry_name(path: Path, dtype: str, key: Mapping[str, Any]) -> str:
    """The file name of an entry: one per checkpoint, dtype and configuration."""
    return cachefile.entry_name(KIND, path, dtype, *filter(None, [key["config"]]))
