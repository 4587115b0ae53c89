"""GGUF files, opened lazily: the header is parsed at once, tokens and tensors are touched when they are asked for.

A model may be split over `NAME-0000i-of-0000n.gguf`; opening any member opens the set. Metadata comes from the first
member, tensors from all of them.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np

from plait.errors import WeightError
from plait.weights.gguf_header import Header, Metadata, parse_header
from plait.weights.sources import (
    TensorInfo,
    close_maps,
    is_raw_split,
    map_file,
    no_such_tensor,
    release_pages,
    some_names,
)

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

# What the files of a set may say differently: the number of each is checked by itself.
_OWN_KEYS = {"split.no", "general.alignment"}


class GGUFFile:
    """An open GGUF model: one file, or all members of a split set.

    version: 2 or 3. metadata: lazy mapping of keys to Python values. tensors: descriptions by name, in file order.
    Raises WeightError for a damaged or incomplete file, UsageError for a path that is not a file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        members = split_members(self.path)
        self._maps: dict[str, mmap.mmap] = {}
        headers = {member: self._open(member) for member in members}
        _check_split(headers, members)
        first = headers[members[0]]
        self.version: int = first.version
        self.metadata: Metadata = first.metadata
        self.tensors: dict[str, TensorInfo] = {}
        for header in headers.values():
            self.tensors |= header.tensors

    def _open(self, path: Path) -> Header:
        data = map_file(path)
        self._maps[str(path)] = data
        return parse_header(data, str(path))

    def raw(self, name: str) -> np.ndarray:
        """The tensor's stored bytes: a read-only uint8 view [nbytes] of the mapped file."""
        info = self.tensors.get(name)
        if info is None:
            raise no_such_tensor(name, self.path, list(self.tensors))
        if not self._maps:
            raise WeightError(f"{self.path}: already closed")
        return np.frombuffer(self._maps[info.file], np.uint8, info.nbytes, info.offset)

    def release(self, name: str) -> None:
        """Take the tensor's pages out of this process; they can be read again all the same."""
        info = self.tensors[name]
        if self._maps:
            release_pages(self._maps[info.file], info.offset, info.nbytes)

    def close(self) -> None:
        """Unmap the files. Views that `raw` gave out stay valid: their mapping goes with the last of them."""
        close_maps(self._maps)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def split_members(path: Path) -> list[Path]:
    """The files of the set that `path` belongs to, in order ([path] when it is not split); none may be missing."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        if is_raw_split(path.name):
            raise WeightError(
                f"{path}: a piece of a file that was cut into byte ranges, which cannot be read alone: join the pieces"
                " in order (cat model.gguf.part* > model.gguf) and open the result"
            )
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise WeightError(f"{path}: its name says part {int(match['number'])} of {count}")
    members = [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [member.name for member in members if not member.exists()]
    if missing:
        raise WeightError(f"{path}: {len(missing)} of {count} split files missing beside it: {some_names(missing)}")
    return members


def _check_split(headers: dict[Path, Header], members: list[Path]) -> None:
    """Refuse a set whose files disagree, with the numbers that do."""
    first = headers[members[0]].metadata
    seen: dict[str, Path] = {}
    for number, (path, header) in enumerate(headers.items()):
        metadata = header.metadata
        count = metadata.get("split.count", 1)
        if count != len(members):
            raise WeightError(_wrong_count(path, metadata, len(members)))
        if len(members) > 1 and metadata.get("split.no", 0) != number:
            raise WeightError(
                f"{path}: split.no is {metadata.get('split.no')} (counted from 0), but its name says part {number + 1}"
            )
        for key in metadata.keys() - _OWN_KEYS if number else ():
            if key in first and metadata[key] != first[key]:
                raise WeightError(
                    f"{path}: {key} is {metadata[key]!r:.60}, but {first[key]!r:.60} in {members[0].name}: the files"
                    " belong to different models"
                )
        for name in header.tensors:
            if name in seen:
                raise WeightError(f"{path}: tensor {name!r} is also in {seen[name].name}")
            seen[name] = path
    expected = first.get("split.tensors.count", len(seen))
    if len(members) > 1 and expected != len(seen):
        raise WeightError(
            f"{members[0]}: split.tensors.count is {expected}, but the {len(members)} files hold {len(seen)} tensors"
        )


def _wrong_count(path: Path, metadata: Metadata, members: int) -> str:
    count = metadata.get("split.count")
    if members == 1 and _SPLIT_NAME.fullmatch(path.name) is None:
        number = metadata.get("split.no")
        part = number + 1 if isinstance(number, int) else number
        return (
            f"{path}: part {part} of a set of {count} files (split.count), but it was renamed: the members must be"
            " called NAME-00001-of-0000N.gguf"
        )
    return f"{path}: split.count is {count}, but its name says {members}"
