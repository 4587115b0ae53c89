"""Headers of safetensors files and of sharded directories, read without trusting them and without torch.

Layout: uint64 header length, that many bytes of JSON (name -> dtype, shape, data_offsets), then the data. The tensors
must fill the data exactly: no holes, no overlaps. The data may begin at any byte: nothing is rounded up.

Which files a directory means: with model.safetensors.index.json exactly the files that it names; else
model.safetensors; else the only other *.safetensors. consolidated*.safetensors (another layout of the same weights)
and adapter*.safetensors never count.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from plait.errors import UsageError, WeightError
from plait.weights.sources import TensorInfo, probable_cause, some_names

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}

# Eight bits and fewer need scales that another tensor holds: formats of their own.
QUANTISED_DTYPES = frozenset(name for name in DTYPE_BITS if name.startswith(("F8_", "F6_")) or name == "F4")

_SHARD_NAME = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of one file, in the order of their data, and its string metadata.

    Raises WeightError naming the file (and tensor) for anything that the format does not allow.
    """
    text, size = _header_text(path)
    header = parse_json_object(text, f"{path}: the header")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightError(f"{path}: __metadata__ is not a map of strings")
    data_start, file = 8 + len(text), str(path)
    tensors = [_tensor_info(name, entry, data_start, file) for name, entry in header.items()]
    # Empty tensors sort before the one that begins where they stand.
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    position = data_start
    for info in tensors:
        if info.offset != position:
            kind = "overlaps the one before it" if info.offset < position else "leaves a hole before it"
            raise WeightError(f"{path}: tensor {info.name!r} {kind} at byte {info.offset} (expected {position})")
        position += info.nbytes
    if position != size:
        raise WeightError(
            f"{path}: the header describes {position} bytes but the file has {size}: it is truncated or damaged"
        )
    return {info.name: info for info in tensors}, metadata


def _header_text(path: Path) -> tuple[bytes, int]:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: not a regular file")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(256)
            length = int.from_bytes(head[:8], "little")
            # The smallest file is a length and "{}".
            if size < 10 or length < 2 or length > min(size - 8, MAX_HEADER_BYTES) or head[8:9] != b"{":
                raise WeightError(_not_safetensors(path, head, size, length))
            file.seek(8)
            return file.read(length), size
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _not_safetensors(path: Path, head: bytes, size: int, length: int) -> str:
    # A JSON object or array from byte 8 on means a real file: its length is what is wrong.
    cause = "" if head[8:9] in (b"{", b"[") else probable_cause(head)
    if cause:
        return f"{path}: not a safetensors file: {cause}"
    if size < 10:
        return f"{path}: not a safetensors file: it has only {size} bytes"
    if length > MAX_HEADER_BYTES:
        return f"{path}: not a safetensors file: its header would have {length} bytes (at most {MAX_HEADER_BYTES})"
    if length > size - 8:
        return f"{path}: its header would have {length} bytes but the file has {size}: it is truncated or damaged"
    return f"{path}: not a safetensors file: the header of {length} bytes is not a JSON object"


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object without duplicate keys, at any level; WeightError beginning with `what`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            for name, _ in reversed(pairs):  # `result` was filled in order; what is gone when asked again came twice
                if result.pop(name, pairs) is pairs:
                    raise WeightError(f"{what} names {name!r:.200} twice")
        return result

    try:
        decoded = text.decode("utf-8")
        value = json.loads(decoded)
        if not _surely_unique(text, value):
            value = json.loads(decoded, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
        raise WeightError(f"{what} is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise WeightError(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


_SPACE_BEFORE_COLON = re.compile(rb'"[ \t\r\n]+:')


def _surely_unique(text: bytes, value: Any) -> bool:
    """Whether no object can have lost a key that was there twice: told by counting, which is much faster than looking
    at each of the 100,000 objects of a large checkpoint. False where that does not settle it.

    Without a backslash a quotation mark followed by a colon ends a key, or begins a string: there are at least as many
    of them as keys. So many keys as that are left in the first two levels where none was lost.
    """
    if not isinstance(value, dict) or b"\\" in text or _SPACE_BEFORE_COLON.search(text):
        return False
    kept = len(value) + sum(len(inner) for inner in value.values() if isinstance(inner, dict))
    return text.count(b'":') == kept


_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


def _tensor_info(name: str, entry: Any, data_start: int, file: str) -> TensorInfo:
    """One entry of the header, checked. A large checkpoint has 100,000 of these: one pass over the numbers."""
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise WeightError(f"{file}: tensor {name!r:.200} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    size = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        raise WeightError(f"{file}: tensor {name!r:.200} has the unknown dtype {dtype!r:.60}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise WeightError(_bad_numbers(name, entry, file))
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or begin < 0 or end < 0:
        raise WeightError(_bad_numbers(name, entry, file))
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise WeightError(_bad_numbers(name, entry, file))
        size *= dim
        if size >> 67:
            raise WeightError(f"{file}: tensor {name!r:.200} has the impossible shape {shape!r:.60}")
    if size != 8 * (end - begin):
        raise WeightError(
            f"{file}: tensor {name!r:.200} ({dtype} {shape!r:.60}) needs {size / 8:g} bytes, but its data_offsets span"
            f" {end - begin:.6g}"
        )
    return TensorInfo(name, tuple(shape), dtype, end - begin, file, data_start + begin)


def _bad_numbers(name: str, entry: dict[str, Any], file: str) -> str:
    return (
        f"{file}: tensor {name!r:.200} has a bad shape or bad data_offsets:"
        f" {entry['shape']!r:.60}, {entry['data_offsets']!r:.60}"
    )


def read_directory(directory: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint directory, shard after shard; see the rule at the top of this file."""
    index = directory / INDEX_NAME
    if index.exists():
        return _read_indexed(directory, index)
    return read_header(single_file(directory))[0]


def single_file(directory: Path) -> Path:
    """The one safetensors file of a directory that has no index."""
    if (directory / SINGLE_NAME).exists():
        return directory / SINGLE_NAME
    found = sorted(file.name for file in directory.glob("*.safetensors"))
    candidates = [name for name in found if not name.startswith(("consolidated", "adapter"))]
    if len(candidates) == 1:
        check_not_shard(directory / candidates[0])
        return directory / candidates[0]
    if candidates:
        raise WeightError(
            f"{directory}: {len(candidates)} safetensors files ({some_names(candidates)}) but no {INDEX_NAME}:"
            f" download the index too, or name one file"
        )
    if found:
        raise WeightError(f"{directory}: only {some_names(found)}: neither {SINGLE_NAME} nor {INDEX_NAME}")
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickled:
        raise WeightError(
            f"{directory}: only pickled weights ({some_names(pickled)}), which can run code and are never loaded:"
            " convert them to safetensors (transformers' save_pretrained does)"
        )
    ggufs = sorted(file.name for file in directory.glob("*.gguf"))
    if ggufs:
        raise WeightError(f"{directory}: its config.json is for safetensors, and it has none: name {some_names(ggufs)}")
    raise WeightError(f"{directory}: no weights: neither {SINGLE_NAME} nor {INDEX_NAME} nor another *.safetensors")


def check_not_shard(path: Path) -> None:
    """Refuse one shard of several as if it were a whole model."""
    match = _SHARD_NAME.fullmatch(path.name)
    if match and int(match[2]) > 1:
        raise WeightError(
            f"{path}: shard {int(match[1])} of {int(match[2])}, not a whole model: give the directory, with all shards"
            f" and {INDEX_NAME}"
        )


def _read_indexed(directory: Path, index: Path) -> dict[str, TensorInfo]:
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise WeightError(f"{index}: {index.stat().st_size} bytes; at most {MAX_HEADER_BYTES} are allowed")
    text = index.read_bytes()
    cause = probable_cause(text[:256])
    if cause and not text.lstrip().startswith((b"{", b"[")):
        raise WeightError(f"{index}: not an index: {cause}")
    weight_map = parse_json_object(text, str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{index}: no weight_map")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        try:
            shards[shard].add(name)
        except (KeyError, TypeError):
            _check_contained(shard, name, index)
            shards[shard] = {name}
    missing = sorted(shard for shard in shards if not (directory / shard).exists())
    if missing:
        raise WeightError(f"{index}: {len(missing)} of {len(shards)} shards missing: {some_names(missing)}")
    tensors: dict[str, TensorInfo] = {}
    for shard, expected in sorted(shards.items()):
        found = read_header(directory / shard)[0]
        _check_shard(index, shard, expected, found, tensors)
        tensors |= found
    return tensors


def _check_shard(
    index: Path, shard: str, expected: set[str], found: dict[str, TensorInfo], before: dict[str, TensorInfo]
) -> None:
    if found.keys() == expected and found.keys().isdisjoint(before.keys()):
        return
    twice = [name for name in found if name in before]
    if twice:
        raise WeightError(f"{index}: in {shard} and in {Path(before[twice[0]].file).name} too: {some_names(twice)}")
    absent = sorted(expected - found.keys())
    if absent:
        raise WeightError(f"{index}: says that {shard} holds {some_names(absent)}, but it does not")
    unlisted = [name for name in found if name not in expected]
    if unlisted:
        raise WeightError(f"{index}: does not list {some_names(unlisted)} for {shard}, which holds them")


def _check_contained(shard: Any, tensor: str, index: Path) -> None:
    """Shard names stay inside the directory, judged by the name alone: a symbolic link there may lead outside
    (that is how download caches lay models out)."""
    parts = PurePosixPath(shard).parts if isinstance(shard, str) else ()
    if not parts or parts[0] == "/" or ".." in parts or any(char in shard for char in "\\\0:"):
        raise WeightError(
            f"{index}: the shard of {tensor!r} is {shard!r}: it must be a relative path inside the directory"
        )
    if not shard.endswith(".safetensors"):
        raise WeightError(f"{index}: the shard of {tensor!r} is {shard!r}, which is not a .safetensors file")
