"""Cold start: from the start of a process to its first token, with the files in the page cache."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from plait.bench.peers import DRIVERS, PEERS, peer_environment, peer_python, peer_version
from plait.bench.processes import plait_command, read_plan
from plait.bench.report import OURS, make_row, start_report
from plait.bench.summary import alternate
from plait.errors import PlaitError

PROMPT = "The capital of France is"
CACHE_VARIABLE = "PLAIT_CACHE"
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # with it every start would compile what an installed package has compiled


def measure_coldstart(
    path: Path, peers: list[str], *, rounds: int = 5, threads: int, advance: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Seconds to the first token of `plait generate`, without and with its cache, and of llama.cpp's script."""
    words = ("generate", str(path), "-p", PROMPT, "-n", "1", "--temperature", "0", "--threads", str(threads))
    with TemporaryDirectory() as kept:
        sides: dict[str, Callable[[], Any]] = {
            OURS: partial(_ours, words, kept),
            f"{OURS} first time": partial(_first_time, words),
        }
        versions = {}
        if "llama-cpp" in peers:
            sides["llama-cpp"] = partial(_llama, path, threads)
            versions["llama-cpp-python"] = peer_version("llama-cpp") or ""
        found = alternate(sides, rounds, advance)
    texts = {name: runs[0].text for name, runs in found.items()}
    settings = {"threads": threads, "runs": rounds, "prompt": repr(PROMPT)}
    engines = {name: read_plan(runs[0].errors) for name, runs in found.items()}
    if "llama-cpp" in engines:
        engines["llama-cpp"] = {"kv_dtype": "fp16"}  # as the class has it by default
    report = start_report("coldstart", path, versions, settings, engines)
    seconds = {name: [run.seconds for run in runs] for name, runs in found.items()}
    details = {"first token": {name: repr(text) for name, text in texts.items()}}
    report["rows"].append(make_row("process start to first token", "s", seconds, better="lower", details=details))
    report["notes"].append(f"{OURS} first time: it packs the weights and writes the cache, from which {OURS} starts")
    return report


class First(NamedTuple):
    """Seconds until a process wrote its first byte, and all that it wrote on either stream."""

    seconds: float
    text: str
    errors: str


def _ours(words: tuple[str, ...], cache: str) -> First:
    environment = {name: value for name, value in os.environ.items() if name != _NO_BYTECODE}
    return first_output(plait_command(*words), {**environment, CACHE_VARIABLE: cache})


def _first_time(words: tuple[str, ...]) -> First:
    with TemporaryDirectory() as empty:
        return _ours(words, empty)


def _llama(path: Path, threads: int) -> First:
    script = str(DRIVERS / "llama_first_token.py")
    assert PEERS["llama-cpp"].requirements
    return first_output([str(peer_python("llama-cpp")), script, str(path), str(threads), PROMPT], peer_environment())


def first_output(command: list[str], environment: dict[str, str]) -> First:
    """Run a process to its end, timed to its first byte of text. Raises PlaitError where it fails."""
    start = time.perf_counter()
    # Unbuffered: what a buffer had read ahead, communicate() would not see.
    process = subprocess.Popen(command, 0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - start
    rest, errors = process.communicate()
    if process.returncode != 0 or not first:
        last = (errors.decode("utf-8", "replace").strip().splitlines() or ["it wrote nothing"])[-1]
        raise PlaitError(f"{command[0]} failed: {last}")
    return First(seconds, (first + rest).decode("utf-8", "replace").strip(), errors.decode("utf-8", "replace"))
