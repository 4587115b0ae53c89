"""Records a model in a process of its own, with a stand-in for torch (plait.plan.shapes_only): torch's import takes
seconds, its memory would stay, and recording needs no number. Meanwhile the calling process does its other work."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.model.config import ModelConfig
from plait.model.families import parse_config
from plait.ops.recording import Recording
from plait.plan import shapes_only

log = logging.getLogger("plait.load")

# Recording takes a fraction of a second; a process that needs longer hangs.
TIMEOUT_S = 60.0


def describe(config: ModelConfig) -> dict[str, Any]:
    """A configuration as JSON: its config.json, and what its checkpoint said elsewhere."""
    divisors = config.rotary[0].divisors
    return {
        "raw": dict(config.raw),
        "tie_embeddings": config.tie_embeddings,
        "divisors": None if divisors is None else list(divisors),
    }


def make_config(description: Mapping[str, Any], strict: bool = False) -> ModelConfig:
    """The way back from `describe`. Raises ConfigError as the checkpoint itself would."""
    config = replace(parse_config(description["raw"], strict), tie_embeddings=description["tie_embeddings"])
    if description["divisors"] is not None:
        first, *others = config.rotary
        config = replace(config, rotary=(replace(first, divisors=tuple(description["divisors"])), *others))
    return config


def is_described(config: ModelConfig) -> bool:
    """Whether `describe` tells all of a configuration, which a program may have changed."""
    try:
        return make_config(json.loads(json.dumps(describe(config)))) == config
    except (PlaitError, ValueError, TypeError):
        return False


def record_config(config: ModelConfig) -> Recording:
    """The operations of a model of this configuration, from a decoder of shapes. Imports torch."""
    from plait.model.decoder import build
    from plait.model.record import record

    return record(build(config, device="meta"))


def recorded_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a model, by recording it."""
    with Recorder(config) as recorder:
        return {ref.name: ref.shape for ref in recorder.result().weights()}


class Recorder:
    """Begins to record when it is made; `result` waits for the end.

    Where torch has been imported anyway, and where the other process fails, this one records. A context manager: the
    process does not outlive it.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        apart = "torch" not in sys.modules and is_described(config)
        self._process = _start(config) if apart else None

    def result(self) -> Recording:
        """Raises what recording raises."""
        if self._process is not None:
            try:
                output, errors = self._process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                errors = f"it took longer than {TIMEOUT_S:.0f} s"
                self._end()
            else:
                if self._process.returncode == 0:
                    return Recording.from_json(output)
            log.debug("recording without torch failed, so torch is imported: %s", errors.strip() or "no reason given")
        return record_config(self._config)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()


def _start(config: ModelConfig) -> subprocess.Popen[str] | None:
    root = str(Path(__file__).resolve().parents[2])
    # The child finds the package where this process found it; -P keeps the working directory out of its path.
    code = (
        f"import sys; {root!r} in sys.path or sys.path.append({root!r}); from plait.plan.recorder import main; main()"
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        log.debug("recording without torch failed, so torch is imported: %s", error)
        return None
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # one that has ended already says why itself
        process.stdin.write(json.dumps(describe(config)))
        process.stdin.flush()
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.stdin = None
    return process


def main() -> None:
    """What the other process runs: a description on standard input becomes a recording on standard output."""
    shapes_only.install()
    config = make_config(json.load(sys.stdin))
    sys.stdout.write(record_config(config).to_json())
