"""The directory of a training run as a model: where its checkpoints lie, and which of them is meant. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.errors import PlaitError, TrainingError
from plait.jsonfile import read_json

FOLDER = "checkpoints"
MARKER = "COMPLETE"
STATE = "training.json"
CONFIG = "config.yaml"


def is_run(path: Path) -> bool:
    """Whether a directory belongs to a training run."""
    return (path / CONFIG).is_file() and (path / FOLDER).is_dir()


def directory_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"


def steps_of(run: Path) -> list[int]:
    """Steps of all checkpoints, whole or not, ascending."""
    names = [p.name.removeprefix("step-") for p in (run / FOLDER).glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())


def marked_files(path: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of every file of a checkpoint, as its marker has them. Raises TrainingError."""
    try:
        listed = read_json(path / MARKER, TrainingError)["files"]
        return {str(name): (int(size), int(checksum)) for name, (size, checksum) in listed.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise TrainingError(f"{path / MARKER} does not list the checkpoint's files") from None


def complete(path: Path) -> bool:
    """Whether a checkpoint has its marker and all files their sizes. (Resuming also reads every byte.)"""
    try:
        return (path / MARKER).exists() and all(
            (path / name).stat().st_size == size for name, (size, _) in marked_files(path).items()
        )
    except (OSError, TrainingError):
        return False


def best_step(run: Path) -> int | None:
    """The step with the best validation figure so far, as the newest whole checkpoint remembers it."""
    for step in reversed(steps_of(run)):
        path = directory_of(run, step)
        if complete(path):
            try:
                best: Any = read_json(path / STATE).get("best")
            except PlaitError:
                continue
            return int(best["step"]) if isinstance(best, dict) else None
    return None


def model_of_run(run: Path) -> Path:
    """The checkpoint that a run stands for as a model: the best where there is one, else the last.

    Raises TrainingError where none is whole yet.
    """
    whole = [step for step in steps_of(run) if complete(directory_of(run, step))]
    if not whole:
        raise TrainingError(
            f"{run}: this training run has no whole checkpoint yet; `plait train {run}` goes on with it"
        )
    best = best_step(run)
    return directory_of(run, best if best in whole and best is not None else whole[-1])
