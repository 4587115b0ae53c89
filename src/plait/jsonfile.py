"""Reads the small text files that a model directory consists of, JSON objects nearly all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, PlaitError

MAX_BYTES = 64 << 20


def check_readable(path: Path, error: type[PlaitError] = ConfigError, max_bytes: int = MAX_BYTES) -> None:
    """Raises `error`, naming the file, for what reading would never end or take too much memory: a pipe, a device, a
    file of more than `max_bytes`. A link counts as what it leads to."""
    try:
        size, is_file = path.stat().st_size, path.is_file()
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from problem
    if not is_file:
        raise error(f"{path} is not a regular file")
    if size > max_bytes:
        raise error(f"{path} has {size} bytes, more than the {max_bytes} that such a file may have")


def read_text(path: Path, error: type[PlaitError] = ConfigError) -> str:
    """The text of a UTF-8 file. Raises `error`, naming the file, where it cannot be read."""
    check_readable(path, error)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text (byte {problem.start})") from problem


def read_json(path: Path, error: type[PlaitError] = ConfigError) -> dict[str, Any]:
    """The JSON object in a file. Raises `error`, naming the file, where it cannot be read or holds something else."""
    try:
        data = json.loads(read_text(path, error))
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not JSON: {problem}") from problem
    if not isinstance(data, dict):
        raise error(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def read_json_if_there(path: Path, error: type[PlaitError] = ConfigError) -> dict[str, Any]:
    """As `read_json`; an empty object where there is no such file."""
    return read_json(path, error) if path.exists() else {}
