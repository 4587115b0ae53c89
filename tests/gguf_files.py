"""Tiny GGUF files for tests: valid ones through the `gguf` package, broken ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VALUE_TYPES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64")
_FORMATS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?"}
_FORMATS |= {"u64": "Q", "i64": "q", "f64": "d"}
_LLAMA = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    architecture: str = "llama",
    version: int = 3,
) -> Path:
    """Write a GGUF file with the `gguf` package.

    metadata: Python values (int -> uint32, negative or large int -> int64; float -> float32; bool; str; list), or a
    pair (value type name of VALUE_TYPES, value). Keys without a dot get the prefix `architecture.`.
    tensors: name -> float array (stored as F32), or a pair (type name, array): floats are quantised to that type
    where the package can, a uint8 array is taken as the raw rows of that type.
    version: 2 and 3 have the same little-endian layout; the number is patched in.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add_value(writer, key if "." in key else f"{architecture}.{key}", value)
    for name, value in tensors.items():
        _add_tensor(writer, name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if version != 3:
        data = bytearray(path.read_bytes())
        data[4:8] = struct.pack("<I", version)
        path.write_bytes(data)
    return path


def _add_value(writer: Any, key: str, value: Any) -> None:
    import gguf

    kinds = dict(zip(VALUE_TYPES, gguf.GGUFValueType, strict=True))
    if isinstance(value, tuple):
        writer.add_key_value(key, value[1], kinds[value[0]])
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        add = writer.add_uint32 if 0 <= value < 1 << 32 else writer.add_int64
        add(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)  # add_string drops empty ones
    else:
        writer.add_array(key, list(value))


def _add_tensor(writer: Any, name: str, value: Any) -> None:
    import gguf

    if not isinstance(value, tuple):
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
        return
    kind = gguf.GGMLQuantizationType[value[0]]
    array = np.ascontiguousarray(value[1])
    if array.dtype != np.uint8:
        array = gguf.quantize(array.astype(np.float32), kind)
    writer.add_tensor(name, array, raw_dtype=kind)


def tiny_llama(
    path: Path, seed: int = 0, metadata: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    """A complete one-layer llama file of some 60 KB (vocabulary 48, hidden 32, 4 heads, 2 kv heads).

    metadata and tensors are added to the defaults, or replace them; a None value removes the entry.
    """
    rng = np.random.default_rng(seed)
    keys: dict[str, Any] = {
        **_LLAMA,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 8,
        "rope.freq_base": 10000.0,
    }
    keys = {f"llama.{key}": value for key, value in keys.items()}
    keys["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(48)]
    keys |= metadata or {}
    shapes = {
        "token_embd.weight": (48, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }
    contents: dict[str, Any] = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    contents |= tensors or {}
    return write_gguf(
        path,
        {key: value for key, value in keys.items() if value is not None},
        {name: value for name, value in contents.items() if value is not None},
    )


def write_split(
    path: Path, parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], total: int | None = None
) -> list[Path]:
    """Write `path`-0000i-of-0000n.gguf files with the split.* keys; a key that a part gives itself wins.

    parts: (metadata, tensors) of each file. total: tensors in the whole set (default: their sum).
    """
    files = []
    total = sum(len(tensors) for _, tensors in parts) if total is None else total
    for number, (metadata, tensors) in enumerate(parts):
        keys: dict[str, Any] = {
            "split.no": ("u16", number),
            "split.count": ("u16", len(parts)),
            "split.tensors.count": ("i32", total),
        }
        name = path.with_name(f"{path.name}-{number + 1:05d}-of-{len(parts):05d}.gguf")
        merged = {key: value for key, value in (keys | dict(metadata)).items() if value is not None}
        files.append(write_gguf(name, merged, tensors))
    return files


@dataclass
class RawGGUF:
    """A GGUF file spelled out field by field, so that each field can be wrong.

    pairs: (key, value type name or number, already encoded value bytes). tensors: (name, dims fastest first, type id,
    offset). counts override the real numbers; `data` follows the padded header.
    """

    pairs: list[tuple[bytes, str | int, bytes]] = field(default_factory=list)
    tensors: list[tuple[bytes, tuple[int, ...], int, int]] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_pairs: int | None = None
    alignment: int = 32

    def encode(self) -> bytes:
        """The file's bytes."""
        tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        out = self.magic + struct.pack("<IQQ", self.version, tensors, pairs)
        for key, kind, value in self.pairs:
            number = VALUE_TYPES.index(kind) if isinstance(kind, str) else kind
            out += packed_string(key) + struct.pack("<I", number) + value
        for name, dims, kind, offset in self.tensors:
            out += packed_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            out += struct.pack("<IQ", kind, offset)
        return out + bytes(-len(out) % self.alignment if self.data else 0) + self.data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path


def packed_string(text: bytes | str, length: int | None = None) -> bytes:
    """A GGUF string: its length (or the one given) as uint64, then its bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def packed(kind: str, value: Any) -> bytes:
    """A GGUF scalar of the named type."""
    return packed_string(value) if kind == "str" else struct.pack("<" + _FORMATS[kind], value)


def packed_array(kind: str, values: Sequence[Any], count: int | None = None) -> bytes:
    """A GGUF array: element type, count (or the one given), elements."""
    head = struct.pack("<IQ", VALUE_TYPES.index(kind), len(values) if count is None else count)
    return head + b"".join(packed(kind, value) for value in values)
