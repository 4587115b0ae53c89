"""Mutated files: every one is either read or refused with our own error, within memory that its size justifies."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz_targets import TARGETS, read_gguf, read_safetensors, tiny_gguf, tiny_safetensors
from tests.fuzzing import outcome, run
from tests.gguf_files import tiny_llama

pytestmark = pytest.mark.slow

FORMATS: dict[str, tuple[Callable[[Path], bytes], Callable[[Path], None]]] = {
    ".gguf": (tiny_gguf, read_gguf),
    ".safetensors": (tiny_safetensors, read_safetensors),
}


# 2,000 of each format of weights, whose headers are read byte by byte, and 2,000 of everything else together.
CASES = {name: 2000 if name in ("gguf", "safetensors") else 166 for name in TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    counts = run(TARGETS[name], CASES[name], tmp_path)
    assert counts["read"] + counts["refused"] == CASES[name]
    assert counts["read"] > 1 and counts["refused"] > CASES[name] // 20


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_every_byte_of_the_header_set_to_the_extremes(tmp_path: Path, suffix: str, value: int) -> None:
    build, read = FORMATS[suffix]
    path = tmp_path / f"m{suffix}"
    original = build(path)
    for position in range(min(len(original), 900)):
        data = bytearray(original)
        data[position] = value
        outcome(path, bytes(data), read)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300), magic=st.booleans())
def test_arbitrary_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, magic: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.gguf"
    content = b"GGUF\3\0\0\0" + data if magic else data
    if outcome(path, content, read_gguf) == "read":
        pytest.fail(f"read as a model: {content!r}")
    other = path.with_suffix(".safetensors")
    outcome(other, struct.pack("<Q", len(data)) + data if magic else data, read_safetensors)


def test_a_tiny_model_itself_is_read(tmp_path: Path) -> None:
    assert outcome(tmp_path / "m.gguf", tiny_llama(tmp_path / "m.gguf").read_bytes(), read_gguf) == "read"
