"""Whole processes: a running `plait serve`, the memory of a process and its children, one that burns CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.errors import PlaitError

START_TIMEOUT_S = 300.0
_SAMPLE_S = 0.05

# Spins for a share of every 4 ms, as a client spins: in slices, at an ordinary priority.
_BURNER = """
import sys, time
share, period = float(sys.argv[1]), 0.004
next_s = time.perf_counter()
while True:
    end = next_s + share * period
    while time.perf_counter() < end:
        pass
    next_s += period
    time.sleep(max(0.0, next_s - time.perf_counter()))
"""


def plait_command(*words: str) -> list[str]:
    """The command line of the plait that is running now, wherever this process found it."""
    root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; {root!r} in sys.path or sys.path.append({root!r}); "
        "from plait.cli.main import main; sys.exit(main())"
    )
    return [sys.executable, "-P", "-c", code, *words]


def read_plan(text: str) -> dict[str, str]:
    """What the lines that plait prints as it loads say of its plan, as OurSide.describe has it."""
    found = re.search(
        r"^.*?plan: (\w+)(?: \((\w+),[^)]*\), matrices (.*?))?, keys and values in (\w+)", text, re.MULTILINE
    )
    if found is None:
        return {"kv_dtype": "unknown"}
    said = {"plan": found[1], "isa": found[2], "weights": found[3], "kv_dtype": found[4]}
    return {name: value for name, value in said.items() if value is not None}


class ServerProcess:
    """`plait serve` on a free port of this machine."""

    def __init__(self, path: Path, threads: int, *flags: str, **environment: str) -> None:
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed in stop)
        words = ("serve", str(path), "--port", "0", "--threads", str(threads), *flags)
        variables = {k: v for k, v in os.environ.items() if k != "PLAIT_API_KEY"} | environment
        self._process = subprocess.Popen(
            plait_command(*words), stdout=self._output, stderr=subprocess.STDOUT, env=variables
        )
        self.pid = self._process.pid
        self.port = 0

    def wait_until_ready(self) -> None:
        """Raises PlaitError where the server does not start."""
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self._process.poll() is None:
            text = self._said()
            found = re.search(r"listening on http://[^\s:]+:(\d+)", text)
            if found and "ready in" in text:
                self.port = int(found[1])
                return
            time.sleep(0.02)
        raise PlaitError(f"plait serve did not start: {self._said().strip()[-500:]}")

    def metric(self, name: str) -> float:
        """The sum of a metric over the models."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as response:
            text = response.read().decode()
        return sum(float(value) for value in re.findall(rf"^plait_{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()

    def plan(self) -> dict[str, str]:
        return read_plan(self._said())

    def _said(self) -> str:
        return os.pread(self._output.fileno(), 1 << 20, 0).decode("utf-8", "replace")


@contextmanager
def running_server(path: Path, threads: int, *flags: str, **environment: str) -> Iterator[ServerProcess]:
    server = ServerProcess(path, threads, *flags, **environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@contextmanager
def burning(share: float) -> Iterator[None]:
    """A process beside the block that takes `share` of one CPU."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _BURNER, str(min(max(share, 0.0), 1.0))])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def process_tree(pid: int) -> list[int]:
    """A process and its descendants (Linux)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(after_name[1])
            except OSError:
                continue
    tree = [pid]
    for member in tree:
        tree += [child for child, parent in parents.items() if parent == member]
    return tree


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process: its own pages and its share of those that others map too."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class MemoryWatch:
    """Samples the PSS of a process tree every 50 ms. peak: bytes; last: of the latest sample."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak = self.last = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def sample(self) -> int:
        self.last = sum(pss_bytes(pid) for pid in process_tree(self._pid))
        self.peak = max(self.peak, self.last)
        return self.last

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self.sample()
