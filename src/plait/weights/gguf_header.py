"""The header of one GGUF file (versions 2 and 3, little-endian), read without trusting it.

Layout (ggml's docs/gguf.md): magic, version, tensor count, key count; keys with typed values; tensor descriptions;
padding to `general.alignment`; tensor data. Every count, length and offset is compared with the bytes that the file
still has before anything is allocated, and sizes are computed in Python's exact integers.

Alignment rule: a uint32, non-zero and a multiple of 8 (the format's own text; ggml insists on a power of two besides).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from plait.errors import WeightError
from plait.weights.gguf_types import BlockType, row_bytes, type_by_id
from plait.weights.sources import TensorInfo, probable_cause

MAX_DIMS = 4
# Far above any model (a 671B one stored with separate experts has 91,000 tensors); bounds the tables of a hostile file.
MAX_ENTRIES = 1 << 20
DEFAULT_ALIGNMENT = 32
_MAX_KEY_BYTES = 65535
_MIN_KEY_ENTRY = 8 + 4 + 1
_MIN_TENSOR_ENTRY = 8 + 4 + 4 + 8

_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
# GGUF value type -> little-endian struct code, which NumPy understands too. Strings and arrays are handled apart.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", _UINT32: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _NUMBERS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """A position in the file's bytes; each read checks that the bytes are there."""

    def __init__(self, data: mmap.mmap | bytes, path: str) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.position = 0

    def need(self, count: int, what: str) -> None:
        """Refuse to go on when fewer than `count` bytes remain."""
        if count > self.size - self.position:
            raise WeightError(
                f"{self.path}: {what} at offset {self.position} needs {count} bytes but {self.size - self.position}"
                " remain: the file is truncated or damaged"
            )

    def number(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        """A length-prefixed UTF-8 string."""
        start = self.position
        length = self.number(_U64, what)
        self.need(length, what)
        if limit is not None and length > limit:
            raise WeightError(f"{self.path}: {what} at offset {start} has {length} bytes; at most {limit} are allowed")
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise WeightError(f"{self.path}: {what} at offset {start} is not UTF-8") from None


@dataclass(slots=True)
class StoredArray:
    """An array value that has been walked over but not decoded.

    kind: element type. starts: byte positions of the strings' length prefixes, for strings.
    """

    key: str
    kind: int
    position: int
    count: int
    starts: np.ndarray | None = None
    end: int = 0

    def decode(self, data: mmap.mmap | bytes, path: str) -> list[Any]:
        """The elements as Python objects; WeightError naming the key when one is not valid."""
        if self.starts is not None:
            return _decode_strings(data, self, path)
        numbers = np.frombuffer(data, "<" + _NUMBERS[self.kind], self.count, self.position)
        if self.kind == _BOOL:
            if self.count and int(numbers.max()) > 1:
                raise WeightError(f"{path}: key {self.key!r} holds a bool that is neither 0 nor 1")
            return numbers.astype(bool).tolist()
        return numbers.tolist()


class Metadata(Mapping[str, Any]):
    """The key/value pairs. Scalars are plain Python values; an array becomes a list when it is first asked for."""

    def __init__(
        self, values: dict[str, Any], data: mmap.mmap | bytes, path: str, kinds: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._values = values
        self.kinds = kinds  # the GGUF value type of each key; of an array also its elements'
        self._data = data
        self._path = path

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, StoredArray):
            if isinstance(self._data, mmap.mmap) and self._data.closed:
                raise WeightError(f"{self._path}: already closed, before key {key!r:.200} was read")
            value = self._values[key] = value.decode(self._data, self._path)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def array_length(self, key: str) -> int:
        """The number of elements of an array, without decoding it."""
        value = self._values[key]
        return value.count if isinstance(value, StoredArray) else len(value)


@dataclass(frozen=True)
class Header:
    """What parse_header found: version, metadata, tensors in file order, and where tensor data begins."""

    version: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    alignment: int
    data_start: int


def parse_header(data: mmap.mmap | bytes, path: str) -> Header:
    """Read and check a whole header; WeightError with file and offset or name for anything that does not fit."""
    cursor = Cursor(data, path)
    version = _check_magic(cursor)
    num_tensors = cursor.number(_U64, "the tensor count")
    num_keys = cursor.number(_U64, "the key count")
    _check_count(cursor, num_keys, _MIN_KEY_ENTRY, "keys")
    _check_count(cursor, num_tensors, _MIN_TENSOR_ENTRY, "tensors")
    values: dict[str, Any] = {}
    kinds: dict[str, tuple[int, ...]] = {}
    for _ in range(num_keys):
        start = cursor.position
        key = cursor.string("a key", _MAX_KEY_BYTES)
        if not key:
            raise WeightError(f"{path}: empty key at offset {start}")
        if key in values:
            raise WeightError(f"{path}: key {key!r:.200} occurs twice, the second time at offset {start}")
        at = cursor.position
        value = values[key] = _read_value(cursor, key)
        elements = (value.kind,) if isinstance(value, StoredArray) else ()
        kinds[key] = (*_U32.unpack_from(data, at), *elements)
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    described = [_read_tensor(cursor) for _ in range(num_tensors)]
    data_start = cursor.position + -cursor.position % alignment
    tensors = _place_tensors(described, data_start, alignment, cursor)
    return Header(version, Metadata(values, data, path, kinds), tensors, alignment, data_start)


def _check_magic(cursor: Cursor) -> int:
    head = bytes(cursor.data[:256])
    if head[:4] != b"GGUF":
        cause = probable_cause(head) or f"it begins with {head[:8]!r}"
        raise WeightError(f"{cursor.path}: not a GGUF file: {cause}")
    cursor.position = 4
    version = cursor.number(_U32, "the version")
    if version in (2, 3):
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version & 0xFFFF == 0 and 0 < swapped < 1 << 16:
        raise WeightError(f"{cursor.path}: a big-endian GGUF file (version {swapped}): only little-endian is supported")
    advice = "convert the original model again" if version < 2 else "only versions 2 and 3 are supported"
    raise WeightError(f"{cursor.path}: GGUF version {version}: {advice}")


def _check_count(cursor: Cursor, count: int, entry_bytes: int, what: str) -> None:
    remaining = cursor.size - cursor.position
    if count > MAX_ENTRIES or count * entry_bytes > remaining:
        raise WeightError(
            f"{cursor.path}: the header announces {count} {what}, but {remaining} bytes remain"
            f" (a file may have {MAX_ENTRIES} at most): the file is truncated or damaged"
        )


def _read_value(cursor: Cursor, key: str) -> Any:
    start = cursor.position
    kind = cursor.number(_U32, f"the type of key {key!r:.200}")
    if key == "general.alignment":
        return _read_alignment(cursor, kind)
    if kind == _STRING:
        return cursor.string(f"the value of key {key!r:.200}")
    if kind == _ARRAY:
        return _skip_array(cursor, key)
    if kind not in _STRUCTS:
        raise WeightError(f"{cursor.path}: key {key!r:.200} has the unknown value type {kind} at offset {start}")
    value = cursor.number(_STRUCTS[kind], f"the value of key {key!r:.200}")
    if kind != _BOOL:
        return value
    if value > 1:
        raise WeightError(f"{cursor.path}: key {key!r:.200} is a bool that is neither 0 nor 1 (it is {value})")
    return value == 1


def _read_alignment(cursor: Cursor, kind: int) -> int:
    if kind != _UINT32:
        raise WeightError(f"{cursor.path}: general.alignment has value type {kind}; it must be a uint32 (type 4)")
    alignment = cursor.number(_U32, "general.alignment")
    if alignment == 0 or alignment % 8:
        raise WeightError(f"{cursor.path}: general.alignment is {alignment}; it must be a non-zero multiple of 8")
    return alignment


def _skip_array(cursor: Cursor, key: str) -> StoredArray:
    """Walk over an array: bounds are checked here, so that decoding later needs no checks."""
    what = f"the array of key {key!r:.200}"
    kind = cursor.number(_U32, what)
    count = cursor.number(_U64, what)
    array = StoredArray(key, kind, cursor.position, count)
    if kind == _STRING:
        cursor.need(count * 8, what)
        array.starts = string_starts(cursor, count, what)
    elif kind in _STRUCTS:
        cursor.need(count * _STRUCTS[kind].size, what)
        cursor.position += count * _STRUCTS[kind].size
    elif kind == _ARRAY:
        raise WeightError(f"{cursor.path}: {what} holds arrays; nested arrays are not supported")
    else:
        raise WeightError(f"{cursor.path}: {what} has the unknown element type {kind}")
    array.end = cursor.position
    return array


_WINDOW = 1 << 18
_PLAIN_STEPS = 1024


def string_starts(cursor: Cursor, count: int, what: str) -> np.ndarray:
    """Positions of `count` consecutive strings' length prefixes, [count] int64; moves the cursor past the last.

    Each string tells only where the next one begins, so a plain walk costs a Python step per token. Instead guess all
    starts in a window at once (a byte followed by seven zero bytes is the prefix of a string under 256 bytes) and keep
    the guesses as far as each one's length leads exactly to the next: those are proved. Where the chain breaks
    (longer strings, empty ones, zero bytes in the text) walk plainly for a while.
    """
    starts = np.empty(count, np.int64)
    done = 0
    while done < count:
        guessed = _guess_starts(cursor, count - done)
        starts[done : done + guessed.size] = guessed
        done += guessed.size
        for i in range(done, min(count, done + (1 if guessed.size > _PLAIN_STEPS else _PLAIN_STEPS))):
            starts[i] = cursor.position
            length = cursor.number(_U64, what)
            cursor.need(length, what)
            cursor.position += length
            done += 1
    return starts


def _guess_starts(cursor: Cursor, wanted: int) -> np.ndarray:
    """The proved starts of strings from the cursor on, which moves behind the last of them (possibly none)."""
    window = np.frombuffer(cursor.data, np.uint8, min(_WINDOW, cursor.size - cursor.position), cursor.position)
    nonzero = np.flatnonzero(window)
    # A prefix is the last non-zero byte before a run of exactly 7 zeros.
    starts = nonzero[:-1][np.diff(nonzero) == 8]
    if not starts.size or starts[0] != 0:
        return np.empty(0, np.int64)
    ends = starts + 8 + window[starts]
    broken = np.flatnonzero(starts[1:] != ends[:-1])
    proved = min(wanted, int(broken[0]) + 1 if broken.size else starts.size)
    if cursor.position + int(ends[proved - 1]) > cursor.size:
        proved -= 1
    if proved <= 0:
        return np.empty(0, np.int64)
    begin = cursor.position
    cursor.position += int(ends[proved - 1])
    return starts[:proved] + begin


def _decode_strings(data: mmap.mmap | bytes, array: StoredArray, path: str) -> list[str]:
    """All strings of an array.

    The fast way decodes them together: of each 8-byte length the last byte, a zero, is kept as separator. Strings that
    contain a zero byte themselves, or are not UTF-8, are decoded one by one.
    """
    assert array.starts is not None
    if not array.count:
        return []
    offsets = array.starts - array.position
    blob = np.frombuffer(data, np.uint8, array.end - array.position, array.position)
    keep = np.ones(blob.size, bool)
    for byte in range(7):
        keep[offsets + byte] = False
    try:
        strings = blob[keep].tobytes().decode().split("\0")[1:]
        if len(strings) == array.count:
            return strings
    except UnicodeDecodeError:
        pass
    starts = array.starts.tolist()
    strings = []
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], array.end], strict=True)):
        try:
            strings.append(data[start + 8 : end].decode())
        except UnicodeDecodeError:
            raise WeightError(f"{path}: element {index} of key {array.key!r} (offset {start}) is not UTF-8") from None
    return strings


def _read_tensor(cursor: Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    """(name, dims fastest first, type, offset from the start of the data)."""
    start = cursor.position
    name = cursor.string("a tensor name", _MAX_KEY_BYTES)
    if not name:
        raise WeightError(f"{cursor.path}: empty tensor name at offset {start}")
    num_dims = cursor.number(_U32, f"the dimension count of tensor {name!r:.200}")
    if num_dims > MAX_DIMS:
        raise WeightError(
            f"{cursor.path}: tensor {name!r:.200} has {num_dims} dimensions; at most {MAX_DIMS} are allowed"
        )
    dims = tuple(cursor.number(_U64, f"the shape of tensor {name!r:.200}") for _ in range(num_dims))
    type_id = cursor.number(_U32, f"the type of tensor {name!r:.200}")
    offset = cursor.number(_U64, f"the offset of tensor {name!r:.200}")
    return name, dims, type_by_id(type_id, name, cursor.path), offset


def _place_tensors(
    described: list[tuple[str, tuple[int, ...], BlockType, int]], data_start: int, alignment: int, cursor: Cursor
) -> dict[str, TensorInfo]:
    """Check sizes, bounds and overlaps; every accepted tensor lies whole inside the file."""
    path, tensors = cursor.path, {}
    for name, dims, kind, offset in described:
        if name in tensors:
            raise WeightError(f"{path}: tensor name {name!r:.200} occurs twice")
        if 0 in dims:
            raise WeightError(f"{path}: tensor {name!r:.200} has a zero in its shape {dims[::-1]}")
        row = dims[0] if dims else 1
        if row % kind.block_size:
            raise WeightError(
                f"{path}: tensor {name!r:.200} has rows of {row} numbers, which the {kind.name} block of"
                f" {kind.block_size} does not divide"
            )
        nbytes = row_bytes(kind, row)
        for dim in dims[1:]:
            nbytes *= dim
        if offset % alignment:
            raise WeightError(f"{path}: tensor {name!r:.200} is at offset {offset}, not a multiple of {alignment}")
        if nbytes > cursor.size - data_start - offset:
            raise WeightError(
                f"{path}: tensor {name!r:.200} needs bytes {data_start + offset} to {data_start + offset + nbytes}, but"
                f" the file has {cursor.size}: it is truncated or damaged"
            )
        tensors[name] = TensorInfo(name, dims[::-1], kind.name, nbytes, path, data_start + offset)
    in_order = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.nbytes > after.offset:
            raise WeightError(f"{path}: tensors {before.name!r} and {after.name!r} overlap at offset {after.offset}")
    return tensors
