"""Writes a decoder as a Hugging Face directory: config.json, safetensors, tokenizer, generation_config.json."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import UsageError, WeightError
from plait.model.decoder import Decoder
from plait.model.families import family
from plait.model.quantisation import without_quantisation
from plait.weights.mapping import Assignment, BoundMap, Part
from plait.weights.packed import PackedDecoder
from plait.weights.transposed import matches

log = logging.getLogger("plait.save")

SHARD_BYTES = 5 * 10**9
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save_pretrained(decoder: Decoder, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `directory` so that transformers loads it. A tied head is written once, as the embedding.

    Everything is written beside the target first and moved into place when complete: an interrupted save or a full disk
    leaves the target as it was. A directory that exists is swapped for the new one by two renames; of its files, those
    that a save does not write are kept. Only an end between the two renames leaves no `directory`: the old one is then
    beside it, whole, as `.NAME-old-...`. Raises WeightError for what config.json cannot express, and UsageError where
    the target is a file.
    """
    directory = directory.resolve()  # a link stays one
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file; give a directory to save into")
    if any(spec.divisors is not None for spec in decoder.config.rotary):
        raise WeightError(
            "this model came from a GGUF file whose rotary scaling is a tensor of divisors (rope_freqs);"
            " config.json has no place for it: save from the original checkpoint instead"
        )
    raw = without_quantisation(decoder.config.raw)
    report = decoder.load_report
    if report is not None and report.quantised:
        log.warning("%s: the weights are written expanded (they were %s)", directory, report.quantised)
    raw["tie_word_embeddings"] = decoder.config.tie_embeddings
    raw["dtype"] = str(decoder.dtype).removeprefix("torch.")
    raw.pop("torch_dtype", None)
    written = family(decoder.config.model_type)
    raw.setdefault("architectures", [written.architecture])
    if written.written_as != decoder.config.model_type:
        raw["model_type"] = written.written_as
        raw.pop("auto_map", None)  # code of its own, for the name that is no longer there
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_weights(decoder, temporary, shard_bytes)
        eos_token_ids = _write_tokenizer(decoder, temporary) | set(decoder.config.eos_token_ids)
        _write_generation_config(decoder, temporary, sorted(eos_token_ids))
        _write_json(temporary / "config.json", raw)
        _move_into_place(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hugging_face_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as the family's files have them, one at a time."""
    parameters: Mapping[str, Tensor] = decoder.tensors() if isinstance(decoder, PackedDecoder) else _parameters(decoder)
    transposed = family(decoder.config.model_type).names.transposed
    stack: dict[str, Tensor] = {}  # the stack of experts that is being cut up: read once for all of its tensors
    for assignment in _assignments(decoder):
        (part, *more) = assignment.parts
        if more or part.place is None:
            tensor = _assemble(assignment, parameters)
            tensor = tensor.unsqueeze(0) if assignment.one_row else tensor
            yield assignment.file, tensor.mT.contiguous() if matches(transposed, assignment.file) else tensor
            continue
        if part.name not in stack:
            stack = {part.name: parameters[part.name].detach().cpu()}
        tensor = part.place.to_file(part.place.of(stack[part.name])).squeeze(0)
        yield assignment.file, (tensor.mT if matches(transposed, assignment.file) else tensor).contiguous()


def _parameters(decoder: Decoder) -> dict[str, Tensor]:
    return dict(decoder.named_parameters())


def _assignments(decoder: Decoder) -> Iterator[Assignment]:
    bound = BoundMap(decoder.config, family(decoder.config.model_type).names)
    return bound.outgoing([name for name, _ in decoder.named_parameters()])


def _assemble(assignment: Assignment, parameters: Mapping[str, Tensor]) -> Tensor:
    parts = [(parameters[p.name].detach(), p.rows) for p in assignment.parts]
    first = parts[0][0]
    if len(parts) == 1 and parts[0][1] is None:
        return first.cpu().contiguous()
    out = torch.empty((sum(t.shape[0] for t, _ in parts), *first.shape[1:]), dtype=first.dtype)
    for tensor, rows in parts:
        assert rows is not None
        out[torch.from_numpy(rows)] = tensor.cpu()
    return out


def _sizes(decoder: Decoder) -> list[tuple[str, int]]:
    """(name, bytes) of what `hugging_face_tensors` gives, without reading a number."""
    parameters = dict(decoder.named_parameters())

    def size(part: Part) -> int:
        whole = parameters[part.name]
        filled = whole if part.place is None else part.place.of(whole)
        return filled.numel() * filled.element_size()

    return [(a.file, sum(size(part) for part in a.parts)) for a in _assignments(decoder)]


def _write_weights(decoder: Decoder, directory: Path, shard_bytes: int) -> None:
    """model.safetensors, or numbered shards with an index where the weights exceed `shard_bytes`."""
    from safetensors.torch import save_file

    sizes = _sizes(decoder)
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes:
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    metadata = {"format": "pt"}
    tensors = hugging_face_tensors(decoder)
    if len(shards) == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata)
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: next(tensors)[1] for name in names}, directory / file, metadata)
        weight_map.update(dict.fromkeys(names, file))
    total = {"total_size": sum(size for _, size in sizes)}
    _write_json(directory / "model.safetensors.index.json", {"metadata": total, "weight_map": weight_map})


def _write_tokenizer(decoder: Decoder, directory: Path) -> set[int]:
    """The tokenizer's files; returns its end tokens, which a GGUF file may imply rather than name."""
    source = decoder.source
    if source is None:
        return set()
    if source.is_dir() or source.suffix == ".safetensors":
        files = source if source.is_dir() else source.parent
        for name in _TOKENIZER_FILES:
            if (files / name).exists():
                shutil.copyfile(files / name, directory / name)
        return set()
    from plait.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    tokenizer.save(directory)
    return set(tokenizer.eos_token_ids)


def _write_generation_config(decoder: Decoder, directory: Path, eos_token_ids: list[int]) -> None:
    target = directory / "generation_config.json"
    if target.exists():
        return
    config = decoder.config
    ids: dict[str, Any] = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    ids["eos_token_id"] = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids or None
    _write_json(target, {k: v for k, v in ids.items() if v is not None})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _move_into_place(temporary: Path, directory: Path) -> None:
    """Swap an existing directory for the new one; what a save does not write moves across afterwards."""
    if not directory.exists():
        os.chmod(temporary, 0o755)
        os.rename(temporary, directory)
        return
    shutil.copymode(directory, temporary)
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
    try:
        os.rename(directory, old)  # onto an empty directory
        os.rename(temporary, directory)
    except BaseException:
        if directory.exists():
            old.rmdir()
        else:
            os.rename(old, directory)
        raise
    for entry in old.iterdir():
        if not _is_replaced(entry.name, directory):
            os.rename(entry, directory / entry.name)
    shutil.rmtree(old)


def _is_replaced(name: str, directory: Path) -> bool:
    """Whether a file of an earlier save must not stay beside the new files: weights always, the tokenizer's if there
    is a new one."""
    if (directory / name).exists() or fnmatch(name, "model*.safetensors*"):
        return True
    tokenizer = name in _TOKENIZER_FILES or fnmatch(name, "tokenizer*")
    return tokenizer and (directory / "tokenizer.json").exists()
