"""The small files of a Hugging Face directory, and how a finished directory gets its name. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from plait.model.config import ModelConfig
from plait.model.families import family, parse_config
from plait.model.quantisation import without_quantisation

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
)
# What tokenizer.ggml.model says in a GGUF file that has none.
NO_TOKENIZER = ("none", "no_vocab")
_TEMPLATES = "additional_chat_templates"


def config_to_write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, without a dtype that was not there: the dictionary that it came from, and what has
    become of it since.

    Divisors of a GGUF file's rope_freqs become a longrope block whose two sets are the same, which divides the
    frequencies so and nothing else; `divisors_note` says it.
    """
    raw = without_quantisation(config.raw)
    written = family(config.model_type)
    if not written.is_own:
        raw.setdefault("architectures", [written.architecture])
    if written.written_as != config.model_type:
        raw["model_type"] = written.written_as
        raw.pop("auto_map", None)  # code of its own, for the name that is no longer there
    if parse_config(raw).tie_embeddings != config.tie_embeddings:
        raw[written.tie_key] = config.tie_embeddings
    divisors = config.rotary[0].divisors if config.rotary else None
    if divisors is not None:
        raw.pop("rope_parameters", None)
        raw["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": list(divisors),
            "long_factor": list(divisors),
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": config.max_positions,
        }
    return raw


def divisors_note(config: ModelConfig) -> list[str]:
    """What is to be said of a file's own divisors."""
    if not config.rotary or config.rotary[0].divisors is None:
        return []
    return ["the rotary table of this GGUF file has divisors (rope_freqs): config.json keeps them as longrope"]


def set_dtype(raw: dict[str, Any], dtype: str) -> None:
    """Write the dtype ("bfloat16", ...) under the key that the configuration has for it."""
    if raw.get("dtype", raw.get("torch_dtype")) != dtype:
        raw.pop("torch_dtype", None)
        raw["dtype"] = dtype


def shard_files(
    directory: Path, sizes: Sequence[tuple[str, int]], shard_bytes: int
) -> Iterator[tuple[Path, list[str]]]:
    """The files to write, each with its tensors, in their order: model.safetensors, or numbered shards and, when the
    last of them is done, the index. sizes: name and bytes of every tensor."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes:
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        yield directory / "model.safetensors", shards[0]
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        yield directory / file, names
        weight_map |= dict.fromkeys(names, file)
    total = {"total_size": sum(size for _, size in sizes)}
    write_json(directory / "model.safetensors.index.json", {"metadata": total, "weight_map": weight_map})


def write_tokenizer(source: Path | None, directory: Path) -> set[int]:
    """The tokenizer's files, of a directory or made of a GGUF file; returns its end tokens, which a GGUF file may imply
    rather than name."""
    if source is None:
        return set()
    if source.is_dir() or source.suffix == ".safetensors":
        files = source if source.is_dir() else source.parent
        for name in TOKENIZER_FILES:
            if (files / name).exists():
                shutil.copyfile(files / name, directory / name)
        if (files / _TEMPLATES).is_dir():
            shutil.copytree(files / _TEMPLATES, directory / _TEMPLATES)
        return set()
    from plait.text.tokenizer import load_tokenizer
    from plait.weights.gguf_reader import GGUFFile

    with GGUFFile(source) as file:
        if file.metadata.get("tokenizer.ggml.model") in NO_TOKENIZER:
            return set()
    tokenizer = load_tokenizer(source)
    tokenizer.save(directory)
    return set(tokenizer.eos_token_ids)


def write_generation_config(config: ModelConfig, directory: Path, eos_token_ids: list[int]) -> None:
    """generation_config.json with the special tokens, unless one is there."""
    target = directory / "generation_config.json"
    if target.exists():
        return
    ids: dict[str, Any] = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    ids["eos_token_id"] = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids or None
    write_json(target, {k: v for k, v in ids.items() if v is not None})


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sync(path: Path) -> None:
    """Have a file or a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def umask() -> int:
    """The permissions that this process gives to nothing that it makes."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def move_into_place(temporary: Path, directory: Path) -> None:
    """Swap an existing directory for the new one; what a save does not write moves across afterwards."""
    if not directory.exists():
        os.chmod(temporary, 0o777 & ~umask())
        os.rename(temporary, directory)
        return
    shutil.copymode(directory, temporary)
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
    try:
        os.rename(directory, old)  # onto an empty directory
        os.rename(temporary, directory)
    except BaseException:
        if directory.exists():  # still, or again: another one was quicker
            with contextlib.suppress(OSError):
                _give_up(old, directory)
        else:
            os.rename(old, directory)
        raise
    _give_up(old, directory)


def _give_up(old: Path, directory: Path) -> None:
    """Remove a replaced directory, once what stays of it has moved across."""
    for entry in old.iterdir():
        if not _is_replaced(entry.name, directory):
            os.rename(entry, directory / entry.name)
    shutil.rmtree(old)


def _is_replaced(name: str, directory: Path) -> bool:
    """Whether a file of an earlier save must not stay beside the new files: weights always, the tokenizer's if there
    is a new one."""
    if (directory / name).exists() or fnmatch(name, "model*.safetensors*"):
        return True
    tokenizer = name in TOKENIZER_FILES or fnmatch(name, "tokenizer*")
    return tokenizer and (directory / "tokenizer.json").exists()
