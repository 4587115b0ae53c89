"""Writes a decoder as a Hugging Face directory: config.json, safetensors, tokenizer, generation_config.json."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from plait.errors import UsageError
from plait.model.decoder import Decoder
from plait.model.families import family
from plait.weights.hf_files import (
    config_to_write,
    move_into_place,
    shard_files,
    write_generation_config,
    write_json,
    write_tokenizer,
)
from plait.weights.mapping import Assignment, BoundMap, Part
from plait.weights.packed import PackedDecoder
from plait.weights.transposed import matches

log = logging.getLogger("plait.save")

SHARD_BYTES = 5 * 10**9


def save_pretrained(decoder: Decoder, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `directory` so that transformers loads it. A tied head is written once, as the embedding.

    Everything is written beside the target first and moved into place when complete: an interrupted save or a full disk
    leaves the target as it was. A directory that exists is swapped for the new one by two renames; of its files, those
    that a save does not write are kept. Only an end between the two renames leaves no `directory`: the old one is then
    beside it, whole, as `.NAME-old-...`. Raises UsageError where the target is a
    file.
    """
    directory = directory.resolve()  # a link stays one
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file; give a directory to save into")
    raw = config_to_write(decoder.config)
    report = decoder.load_report
    if report is not None and report.quantised:
        log.warning("%s: the weights are written expanded (they were %s)", directory, report.quantised)
    raw[family(decoder.config.model_type).tie_key] = decoder.config.tie_embeddings
    raw["dtype"] = str(decoder.dtype).removeprefix("torch.")
    raw.pop("torch_dtype", None)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_weights(decoder, temporary, shard_bytes)
        eos_token_ids = write_tokenizer(decoder.source, temporary) | set(decoder.config.eos_token_ids)
        write_generation_config(decoder.config, temporary, sorted(eos_token_ids))
        write_json(temporary / "config.json", raw)
        move_into_place(temporary, directory)
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

    tensors = hugging_face_tensors(decoder)
    for file, names in shard_files(directory, _sizes(decoder), shard_bytes):
        save_file({name: next(tensors)[1] for name in names}, file, {"format": "pt"})
