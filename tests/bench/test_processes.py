"""Memory of processes, the CPU burner, the load client, and what is read of a streamed answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from plait.bench.processes import MemoryWatch, burning, process_tree, pss_bytes
from plait.bench.serving import completion_text, completion_tokens, stream_requests
from plait.errors import PlaitError

CHILD = "import sys, subprocess; {body}; print('ready', flush=True); sys.stdin.read()"


def start(body: str) -> subprocess.Popen[str]:
    code = CHILD.format(body=body)
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.communicate("")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_tree_is_what_its_processes_hold() -> None:
    inner = "import sys; b = bytearray(b'1') * (40 << 20); print('ready', flush=True); sys.stdin.read()"
    body = f"p = subprocess.Popen([sys.executable, '-S', '-c', {inner!r}], stdout=-1); p.stdout.readline()"
    child = start(body)
    try:
        tree = process_tree(child.pid)
        assert len(tree) == 2 and tree[0] == child.pid
        assert pss_bytes(tree[1]) > 40 << 20 > pss_bytes(child.pid)
        with MemoryWatch(child.pid) as watch:
            time.sleep(0.2)
        assert 40 << 20 < watch.peak < 80 << 20
    finally:
        end(child)
    assert pss_bytes(2**22 + 1) == 0  # no such process


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_burner_takes_its_share_and_ends_with_the_block() -> None:
    with burning(0.3):
        (pid,) = set(process_tree(os.getpid())[1:])
        time.sleep(0.3)
        before, start_s = cpu_seconds(pid), time.monotonic()
        time.sleep(1.0)
        share = (cpu_seconds(pid) - before) / (time.monotonic() - start_s)
    assert 0 < share < 0.45, share  # 0.3 on an idle machine, less on a busy one
    assert pid not in process_tree(os.getpid())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_tokens_and_text_of_a_stream() -> None:
    events = [
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [], "usage": {"completion_tokens": 7}},
    ]
    text = "HTTP/1.1 200 OK\r\n\r\n" + "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
    assert completion_tokens(text) == 7 and completion_text(text) == "ab"
    assert completion_tokens("HTTP/1.1 500 no\r\n\r\nsorry") == 0


class FakeServer:
    """Answers every request with one event of usage; .port as ServerProcess has it."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.bodies: list[dict[str, Any]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            length = 0
            while (line := lines.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.bodies.append(json.loads(lines.read(length)))
            usage = json.dumps({"choices": [], "usage": {"completion_tokens": self.tokens}})
            connection.sendall(f"HTTP/1.1 200 OK\r\n\r\ndata: {usage}\n\ndata: [DONE]\n\n".encode())

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._listener.close()


def test_the_load_client_sends_every_prompt_once_and_checks_what_comes() -> None:
    server = FakeServer(tokens=5)
    try:
        result = stream_requests(server, [[1, 2], [3]], 5, salt="x")  # type: ignore[arg-type]
        assert result["seconds"] > 0 and result["cpu_s"] > 0 and len(result["first_s"]) == 2
        assert sorted(body["prompt"] for body in server.bodies) == [[1, 2], [3]]
        assert all(body["max_tokens"] == 5 and body["stream"] and body["ignore_eos"] for body in server.bodies)
        with pytest.raises(PlaitError, match="brought 5 of 6 tokens"):
            stream_requests(server, [[1]], 6, salt="x")  # type: ignore[arg-type]
    finally:
        server.close()
    with pytest.raises(PlaitError, match="load client failed"):
        stream_requests(server, [[1]], 5, salt="x")  # type: ignore[arg-type]
