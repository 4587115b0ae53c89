"""Checkpoints of a run: each a model directory that can be served, with what training needs to go on exactly.

    checkpoints/step-00000060/
        config.json, model.safetensors, tokenizer.json, ...   as save_pretrained writes them
        optimizer.pt                                          the optimiser's state
        random.pt                                             states of the random number generators
        training.json                                         step, tokens, data index, scaler, best metric
        COMPLETE                                              size and checksum of every file; written last

No torch at import: whoever serves a run looks for its checkpoint here too, through `plait.weights.locate`.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import TrainingError
from plait.jsonfile import read_json
from plait.weights.hf_files import sync
from plait.weights.runs import FOLDER, MARKER, STATE, best_step, complete, directory_of, marked_files, steps_of

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Found:
    """A whole checkpoint. state: its training.json."""

    path: Path
    step: int
    state: Mapping[str, Any]


def save(run: Path, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """Write checkpoint `step` of a run; at any moment there is either all of it under its name, or nothing.

    write: fills a directory that does not exist yet (save_pretrained and the torch files); training.json is added from
    `state`. Everything is on the disk before the rename, and the marker comes after it. Raises OSError (a full disk)
    having removed what it wrote; earlier checkpoints are untouched.
    """
    folder, target = run / FOLDER, directory_of(run, step)
    temporary = folder / f".{target.name}.writing"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(temporary)
        (temporary / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        files = {}
        for file in sorted(p for p in temporary.rglob("*") if p.is_file()):
            files[str(file.relative_to(temporary))] = [file.stat().st_size, _checksum(file)]
            sync(file)
        sync(temporary)
        if target.exists():  # damaged, or of a run that went on from an earlier one
            (target / MARKER).unlink(missing_ok=True)
            shutil.rmtree(target)
        os.rename(temporary, target)
        sync(folder)
        _write_marker(target, files)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if not complete(target):
            shutil.rmtree(target, ignore_errors=True)
        raise
    return target


def last_good(run: Path, warn: Callable[[str], None]) -> Found | None:
    """The newest checkpoint that is whole, by every byte of it; None where a run has none.

    Those that are not are named to `warn`, and lose their marker where an older one is whole, so that nobody serves
    them or counts them among the last. Raises TrainingError where there are some and none of them is whole: to begin
    anew would be to lose a run.
    """
    leftovers = list((run / FOLDER).glob(".*step-*")) if (run / FOLDER).is_dir() else []
    for path in leftovers:  # a save that was killed; the lock says that nobody writes now
        shutil.rmtree(path, ignore_errors=True)
    steps = steps_of(run)
    rejected: list[Path] = []
    for step in reversed(steps):
        path = directory_of(run, step)
        fault = damage(path)
        if fault is None:
            for other in rejected:
                (other / MARKER).unlink(missing_ok=True)
            return Found(path, step, read_json(path / STATE, TrainingError))
        warn(f"{path}: {fault}; the checkpoint before it is used")
        rejected.append(path)
    if any((directory_of(run, step) / MARKER).exists() for step in steps):
        raise TrainingError(
            f"{run}: none of its {len(steps)} checkpoints is whole; give out= another directory to begin anew"
        )
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, None where every file has its size and checksum."""
    if not (path / MARKER).exists():
        return "it was not finished"
    try:
        files = marked_files(path)
    except TrainingError as error:
        return str(error)
    for name, (size, checksum) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
        if _checksum(file) != checksum:
            return f"the checksum of {name} is wrong"
    return None


def prune(run: Path, keep_last: int, best: int | None) -> None:
    """Remove all but the last `keep_last` whole checkpoints and the best. What is removed loses its marker first."""
    whole = [step for step in steps_of(run) if complete(directory_of(run, step))]
    kept = {*whole[-keep_last:], best}
    for step in whole:
        if step not in kept:
            path = directory_of(run, step)
            (path / MARKER).unlink()
            shutil.rmtree(path)


def _write_marker(path: Path, files: Mapping[str, Any]) -> None:
    temporary = path / f".{MARKER}"
    temporary.write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    sync(temporary)
    os.rename(temporary, path / MARKER)
    sync(path)


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while part := stream.read(_READ_BYTES):
            value = zlib.crc32(part, value)
    return value


__all__ = ["Found", "best_step", "damage", "last_good", "prune", "save"]
