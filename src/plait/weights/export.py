"""Writes a decoder as a Hugging Face directory: config.json, safetensors, tokenizer, generation_config.json."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from plait.errors import UsageError
from plait.kernels.native import usable_cpus
from plait.model.decoder import Decoder
from plait.weights.hf_files import move_into_place
from plait.weights.hf_writer import DirectoryContents, directory_contents, write_directory
from plait.weights.rows import DecoderParameters

log = logging.getLogger("plait.save")

SHARD_BYTES = 5 * 10**9
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    report = decoder.load_report
    if report is not None and report.quantised:
        log.warning("%s: the weights are written expanded (they were %s)", directory, report.quantised)
    contents = _contents(decoder)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write_directory(contents, temporary, decoder.source, {}, shard_bytes=shard_bytes)
        move_into_place(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hugging_face_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as the family's files have them, one at a time."""
    for tensor in _contents(decoder).tensors:
        yield tensor.name, torch.from_numpy(tensor.data()).view(_DTYPES[tensor.storage]).reshape(tensor.shape)


def _contents(decoder: Decoder) -> DirectoryContents:
    return directory_contents(decoder.config, DecoderParameters(decoder), None, {}, usable_cpus())
