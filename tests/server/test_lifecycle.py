"""Start, shutdown, and what happens when one of the two processes dies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import UsageError
from plait.kernels.native import native_library
from plait.server.run import _listen
from tests.server.running import Server, children, is_alive, running, wait_for

pytestmark = pytest.mark.slow
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

LONG = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}


def _read_some(connection: socket.socket) -> bytes:
    """The beginning of a streamed answer, up to its first event."""
    data = b""
    while b"data: " not in data:
        more = connection.recv(4096)
        assert more, "the stream ended early"
        data += more
    return data


def _read_rest(connection: socket.socket) -> bytes:
    data = b""
    while more := connection.recv(65536):
        data += more
    return data


@linux
def test_the_http_process_has_no_torch(server):
    def has_torch(pid):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    server.complete(prompt="x", max_tokens=1, ignore_eos=True)
    assert not has_torch(server.process.pid)
    assert has_torch(server.engine_pid) == (native_library() is None)  # the native plan needs none either


def test_the_start_says_what_runs_and_what_fits(server):
    assert re.search(r"model tiny, weights in (fp32|float32), context 8,192 tokens", server.output)
    assert "key/value pool" in server.output and "requests of 8,192 tokens" in server.output
    assert f"listening on {server.url}" in server.output
    assert server.url.startswith("http://127.0.0.1:") and "warning" not in server.output


@linux
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(model_dir, kind):
    with running(str(model_dir)) as server:
        engine = server.engine_pid
        with server.rude_request("/v1/completions", prompt="x", max_tokens=300, ignore_eos=True, stream=True) as stream:
            data = _read_some(stream)
            server.process.send_signal(kind)
            data += _read_rest(stream)
        assert b'"finish_reason":"length"' in data and b"[DONE]" in data
        assert server.wait() == 0
        assert not is_alive(engine)


@linux
def test_requests_that_do_not_end_in_time_are_aborted_on_shutdown(model_dir):
    with running(str(model_dir), "--shutdown-timeout", "0.5") as server:
        engine = server.engine_pid
        with server.rude_request("/v1/completions", **LONG, stream=True) as stream:
            _read_some(stream)
            server.process.send_signal(signal.SIGTERM)
            rest = _read_rest(stream)
        assert b"shutting down" in rest and b"[DONE]" in rest
        assert server.wait() == 0
        assert not is_alive(engine)


@linux
def test_killing_the_engine_ends_everything_with_an_error(model_dir):
    with running(str(model_dir)) as server:
        engine = server.engine_pid
        with (
            server.rude_request("/v1/completions", **LONG, stream=True) as stream,
            server.rude_request("/v1/completions", **LONG) as whole,
        ):
            _read_some(stream)
            os.kill(engine, signal.SIGKILL)
            wait_for(lambda: server.get("/health").status_code == 503, 5)
            assert server.get("/ready").status_code == 503
            assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
            rest = _read_rest(stream)
            answer = _read_rest(whole)
        assert b'"error"' in rest and b"SIGKILL" in rest and b"[DONE]" in rest
        assert answer.startswith(b"HTTP/1.1 503") and b"SIGKILL" in answer
        assert server.wait() == 1
        assert not is_alive(engine)


@linux
def test_killing_the_http_process_leaves_no_engine(model_dir):
    with running(str(model_dir)) as server:
        engine = server.engine_pid
        with server.rude_request("/v1/completions", **LONG, stream=True) as stream:
            _read_some(stream)
            server.process.kill()
            server.wait()
            wait_for(lambda: not is_alive(engine), 5)


@linux
def test_killing_the_http_process_during_the_start_leaves_no_engine(model_dir):
    server = Server(str(model_dir))
    wait_for(lambda: bool(children(server.process.pid)), 60)
    engine = server.engine_pid
    server.process.kill()
    server.wait()
    wait_for(lambda: not is_alive(engine), 5)


def test_sigterm_during_the_start_ends_it(model_dir):
    server = Server(str(model_dir))
    wait_for(lambda: bool(children(server.process.pid)), 60)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in server.output


@linux
def test_killing_the_engine_during_the_start_is_one_line(model_dir):
    server = Server(str(model_dir))
    wait_for(lambda: bool(children(server.process.pid)), 60)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait() == 1
    assert len(server.lines) == 1 and "SIGKILL" in server.lines[0] and "loading" in server.lines[0]


@linux
def test_sigterm_to_the_engine_lets_running_requests_finish(model_dir):
    with running(str(model_dir)) as server:
        with server.rude_request("/v1/completions", prompt="x", max_tokens=300, ignore_eos=True, stream=True) as stream:
            data = _read_some(stream)
            os.kill(server.engine_pid, signal.SIGTERM)
            data += _read_rest(stream)
        assert b'"finish_reason":"length"' in data
        assert server.wait() == 1


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    for path in (tmp_path, tmp_path / "missing"):
        server = Server(str(path))
        assert server.wait(60) != 0
        assert len(server.lines) == 1 and server.lines[0].startswith("plait: error: ")


def test_a_port_that_is_taken_is_said_at_once(model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = Server(str(model_dir), "--port", str(taken.getsockname()[1]))
        assert server.wait(60) == 2
    assert "port" in server.output and "Traceback" not in server.output


def test_of_two_servers_that_bound_one_port_together_only_one_can_listen():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with _listen("127.0.0.1", port), pytest.raises(OSError):
            other.listen()
    with pytest.raises(UsageError, match="cannot listen on a..b"):
        _listen("a..b", 0)


def test_an_http_server_that_cannot_start_is_one_line_and_a_failure(tmp_path, model_dir):
    # A uvicorn whose start fails as where its port is taken.
    code = (
        "import sys, uvicorn\n"
        "async def startup(self, sockets=None): sys.exit(1)\n"
        "uvicorn.Server.startup = startup\n"
        "from plait.cli.main import main\n"
        f"if __name__ == '__main__': sys.exit(main(['serve', {str(model_dir)!r}, '--port', '0', '--threads', '1']))\n"
    )
    script = tmp_path / "start.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("plait: error: the HTTP server failed")
    assert "Traceback" not in done.stderr
