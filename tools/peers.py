"""Other engines to compare with, each in a virtual environment of its own outside this folder.

An engine installed beside plait would replace its torch and numpy; here neither can touch the other, and
tests and benchmarks drive a peer as a subprocess of `peer_python(name)`.

    python tools/peers.py list
    python tools/peers.py install llama-cpp
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """One engine: what pip installs, the environment of its build, and a line of Python that prints its version."""

    requirements: tuple[str, ...]
    probe: str
    build_environment: dict[str, str] = field(default_factory=dict)


# A new peer is one more row.
PEERS = {
    "llama-cpp": Peer(
        requirements=("llama-cpp-python==0.3.36",),
        probe="import llama_cpp; print(llama_cpp.__version__)",
        # For the CPU at hand, as its users build it: a comparison with a portable build would flatter us.
        build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
}


def peers_directory() -> Path:
    """Where the environments live: $PLAIT_PEERS, or a folder in the user's cache."""
    chosen = os.environ.get("PLAIT_PEERS")
    return Path(chosen) if chosen else Path.home() / ".cache" / "plait-peers"


def peer_python(name: str) -> Path:
    """The interpreter of the peer's environment, whether it exists or not."""
    return peers_directory() / name / "bin" / "python"


def peer_version(name: str) -> str | None:
    """The version of an installed peer that works, else None."""
    python = peer_python(name)
    if not python.is_file():
        return None
    done = subprocess.run([str(python), "-c", PEERS[name].probe], capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


def install(name: str) -> str:
    """Installs the peer unless it works already; returns its version."""
    peer = PEERS[name]
    if (version := peer_version(name)) is not None:
        return version
    print(f"{name}: installing {' '.join(peer.requirements)} in {peer_python(name).parents[1]} (this may compile)")
    venv.create(peer_python(name).parents[1], with_pip=True, clear=True)
    command = [str(peer_python(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *peer.requirements], check=True, env={**os.environ, **peer.build_environment})
    version = peer_version(name)
    if version is None:
        raise SystemExit(f"{name}: installed, but `{peer.probe}` fails in {peer_python(name)}")
    return version


def main() -> None:
    parser = argparse.ArgumentParser(description="install or list the engines that plait is compared with")
    parser.add_argument("action", choices=["install", "list"])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PEERS)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PEERS):
        sys.exit(f"no peer named {', '.join(sorted(unknown))}: known are {', '.join(PEERS)}")
    for name in arguments.names or PEERS:
        version = install(name) if arguments.action == "install" else peer_version(name)
        print(f"{name}: {version or 'not installed'} ({peer_python(name).parents[1]})")


if __name__ == "__main__":
    main()
