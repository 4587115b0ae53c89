"""Reads the JSON objects that a model directory consists of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, PlaitError


def read_json(path: Path, error: type[PlaitError] = ConfigError) -> dict[str, Any]:
    """The JSON object in a file. Raises `error`, naming the file, where it cannot be read or holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not JSON: {problem}") from problem
    if not isinstance(data, dict):
        raise error(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def read_json_if_there(path: Path, error: type[PlaitError] = ConfigError) -> dict[str, Any]:
    """As `read_json`; an empty object where there is no such file."""
    return read_json(path, error) if path.exists() else {}
