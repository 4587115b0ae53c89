"""Other engines to compare with, each in a virtual environment of its own outside this folder.

An engine installed beside plait would replace its torch and numpy; here neither can touch the other, and
tests and benchmarks drive a peer as a subprocess of `peer_python(name)`. The table of them is in plait.bench.peers.

    python tools/peers.py list
    python tools/peers.py install llama-cpp
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv

from plait.bench.peers import INSTALLABLE, PEERS, peer_python, peer_version, peers_directory

__all__ = ["INSTALLABLE", "PEERS", "install", "peer_python", "peer_version", "peers_directory"]


def install(name: str) -> str:
    """Installs the peer unless it works already; returns its version."""
    peer = PEERS[name]
    if (version := peer_version(name)) is not None:
        return version
    print(f"{name}: installing {' '.join(peer.requirements)} in {peer_python(name).parents[1]} (this may compile)")
    venv.create(peer_python(name).parents[1], with_pip=True, clear=True)
    pip = [str(peer_python(name)), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *peer.requirements], check=True, env={**os.environ, **peer.build_environment})
    if peer.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *peer.unwanted], check=True)
    version = peer_version(name)
    if version is None:
        raise SystemExit(f"{name}: installed, but `{peer.probe}` fails in {peer_python(name)}")
    return version


def main() -> None:
    parser = argparse.ArgumentParser(description="install or list the engines that plait is compared with")
    parser.add_argument("action", choices=["install", "list"])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(INSTALLABLE)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(INSTALLABLE):
        sys.exit(f"no peer named {', '.join(sorted(unknown))}: known are {', '.join(INSTALLABLE)}")
    for name in arguments.names or INSTALLABLE:
        version = install(name) if arguments.action == "install" else peer_version(name)
        print(f"{name}: {version or 'not installed'} ({peer_python(name).parents[1]})")


if __name__ == "__main__":
    main()
