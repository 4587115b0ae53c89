"""Mutated files: every one is either read or refused with our own error, within memory that its size justifies."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from plait.errors import PlaitError
from plait.weights.gguf_config import gguf_config
from plait.weights.gguf_source import GGUFSource
from plait.weights.safetensors_source import SafetensorsSource
from tests.gguf_files import tiny_llama, write_gguf

pytestmark = pytest.mark.slow

INTERESTING = (
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    127,
    128,
    255,
    256,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 60,
    1 << 63,
    (1 << 64) - 1,
)
PEAK_BYTES = 50_000_000


def tiny_gguf(path: Path) -> bytes:
    """Under 2 KB, with every kind of value, so that most mutations hit the header."""
    keys = {
        "block_count": 1,
        "context_length": 32,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "general.alignment": 32,
        "a.flag": True,
        "a.text": "text",
        "a.ints": [1, 2, 3],
        "a.flags": [True, False],
        "tokenizer.ggml.tokens": ["a", "bc", "", "d" * 20],
    }
    tensors = {"token_embd.weight": ("Q8_0", torch.ones(4, 32).numpy()), "output_norm.weight": torch.ones(32).numpy()}
    tensors["half"] = ("BF16", torch.ones(3, 4).numpy())
    return write_gguf(path, keys, tensors).read_bytes()


def tiny_safetensors(path: Path) -> bytes:
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.zeros(0)}, path, {"format": "pt"})
    return path.read_bytes()


def read_gguf(path: Path) -> None:
    source = GGUFSource(path)
    for key in source.metadata:
        source.metadata[key]
    for name in source.names():
        source.read(name)
    gguf_config(source.metadata, source.file.tensors)


def read_safetensors(path: Path) -> None:
    source = SafetensorsSource(path)
    for name in source.names():
        source.read(name)


FORMATS: dict[str, tuple[Callable[[Path], bytes], Callable[[Path], None]]] = {
    ".gguf": (tiny_gguf, read_gguf),
    ".safetensors": (tiny_safetensors, read_safetensors),
}


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: bytes set, integers planted, pieces removed, repeated or moved, the end cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) or 1)
        kind = rng.randrange(7)
        if kind <= 1 and out:
            out[at] = rng.randrange(256)
        elif kind == 2:
            code = rng.choice("BIQ")
            value = rng.choice(INTERESTING) & ((1 << (8 * struct.calcsize("<" + code))) - 1)
            out[at : at + struct.calcsize("<" + code)] = struct.pack("<" + code, value)
        elif kind == 3:
            del out[at : at + rng.randint(1, 16)]
        elif kind == 4:
            out[at:at] = out[at : at + rng.randint(1, 64)]
        elif kind == 5:
            other = rng.randrange(len(out) or 1)
            out[at : at + 8], out[other : other + 8] = out[other : other + 8], out[at : at + 8]
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def outcome(path: Path, data: bytes, read: Callable[[Path], None]) -> str:
    """ "read" or "refused"; any other exception, or an error of several lines, fails the test."""
    path.write_bytes(data)
    try:
        read(path)
    except PlaitError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return "refused"
    return "read"


def run_fuzz(cases: int, directory: Path, suffix: str, seed: int = 0) -> dict[str, int]:
    """Read `cases` mutations of a tiny file; returns how many were read and refused."""
    build, read = FORMATS[suffix]
    path = directory / f"m{suffix}"
    original = build(path)
    assert outcome(path, original, read) == "read"
    rng = random.Random(seed)
    counts = {"read": 0, "refused": 0}
    tracemalloc.start()
    for _ in range(cases):
        counts[outcome(path, mutate(original, rng), read)] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < PEAK_BYTES
    return counts


@pytest.mark.parametrize("suffix", FORMATS)
def test_mutated_files_are_read_or_refused(tmp_path: Path, suffix: str) -> None:
    counts = run_fuzz(2000, tmp_path, suffix)
    assert counts["read"] > 20 and counts["refused"] > 500


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
