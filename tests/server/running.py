"""A real `plait serve` on a free port of this machine, and small HTTP tools that can be rude."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


class Server:
    """The process, its address, and what it has printed so far."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        variables.pop("PLAIT_API_KEY", None)
        variables |= environment
        # One thread: two of them waiting for one another are slow on a machine that has other work.
        command = [sys.executable, "-m", "plait.cli.main", "serve", "--port", "0", "--threads", "1", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_until_ready(self) -> Server:
        wait_for(lambda: "ready in" in self.output or self.process.poll() is not None, START_TIMEOUT_S)
        found = re.search(r"listening on (http://\S+:(\d+))", self.output)
        assert found, f"the server did not start:\n{self.output}"
        self.url, self.port = found[1], int(found[2])
        self.client = httpx.Client(base_url=self.url, timeout=120)
        return self

    @property
    def engine_pid(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    def wait(self, timeout_s: float = 30.0) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    # Requests

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, document: Any = None, **options: Any) -> httpx.Response:
        if document is not None:
            options["json"] = document
        return self.client.post(path, **options)

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", fields)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The parsed events of a stream; the last one is "[DONE]"."""
        with self.client.stream("POST", path, json={**fields, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    def metric(self, name: str) -> float:
        found = re.search(rf"^plait_{name}\{{[^}}]*\}} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def deep_health(self) -> dict[str, Any]:
        """Of the first model: integrity, blocks, free_blocks, running_or_waiting."""
        return next(iter(self.get("/health?deep=1").json()["models"].values()))

    def wait_until_idle(self, timeout_s: float = 5.0) -> None:
        """Until no block is held; the block accounts must be right then."""

        def idle() -> bool:
            health = self.deep_health()
            free = health["free_blocks"] == health["blocks"] - 1  # all but the null block
            return free and health["running_or_waiting"] == 0 and health["integrity"] == "ok"

        wait_for(idle, timeout_s)

    @contextmanager
    def rude_request(self, path: str, **fields: Any) -> Iterator[socket.socket]:
        """A request on a bare socket, which is closed at the end of the block whatever has come by then."""
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            yield connection


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[Server]:
    server = Server(*arguments, **environment)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not so within {timeout_s} s"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Process ids whose parent is `pid` (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(after_name[1]) == pid:
                found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
