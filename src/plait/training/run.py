"""The directory of a run: its lock, its configuration, and its log cut back to a checkpoint."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from plait.errors import TrainingError, UsageError
from plait.jsonfile import read_text
from plait.training.recipe import dump_yaml, parse_yaml
from plait.weights.runs import CONFIG, FOLDER

LOG = "log.jsonl"
_LOCK = "lock"


class RunDirectory:
    """A run that this process may write to, until `close`. Raises TrainingError where another process trains in it.

    The lock belongs to the open file: it goes with the process, however that ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file; give out= a directory for the run")
        if path.is_dir() and any(path.iterdir()) and not _is_ours(path):
            raise UsageError(f"{path} is not empty and no training run; give out= another directory")
        (path / FOLDER).mkdir(parents=True, exist_ok=True)
        self._lock = open(path / _LOCK, "a+")  # noqa: SIM115 (held open until close)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise TrainingError(f"{path}: process {owner} is training here; wait for it, or stop it first") from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log_file(self) -> Path:
        return self.path / LOG

    def stored_config(self) -> dict[str, Any] | None:
        """The resolved configuration that the run was begun with, None for a new run."""
        file = self.path / CONFIG
        if not file.exists():
            return None
        data = parse_yaml(read_text(file), str(file))
        if not isinstance(data, dict):
            raise TrainingError(f"{file} is damaged: it holds no configuration")
        return data

    def store_config(self, config: dict[str, Any]) -> None:
        _replace(self.path / CONFIG, f"# The resolved configuration of this run.\n{dump_yaml(config)}")

    def cut_log(self, step: int) -> None:
        """Drop the log's lines of later steps, and a line that was being written when the process ended."""
        if not self.log_file.exists():
            return
        kept = []
        for line in self.log_file.read_text(encoding="utf-8", errors="replace").split(
            "\n"
        ):  # texts have other line ends
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("step", 0) <= step:
                kept.append(line + "\n")
        _replace(self.log_file, "".join(kept))


def _is_ours(path: Path) -> bool:
    return (path / CONFIG).exists() or (path / FOLDER).is_dir() or (path / _LOCK).exists()


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.writing")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(temporary, file)
