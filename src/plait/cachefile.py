"""Files of the cache: named arrays with facts about them, written once, mapped when read. No torch.

The directory is $PLAIT_CACHE, else plait/ under $XDG_CACHE_HOME or ~/.cache; PLAIT_CACHE=none does without. An entry is
one file. It is written under another name and renamed when it is whole, so that neither a kill nor two writers at once
leave anything half; a file that is damaged all the same (a crash of the machine: nothing is forced to the disk) does
not match its digests and counts as absent. A directory or an entry that another user owns or may write is not trusted:
digests prove that an entry is whole, not who made it. All entries together stay below LIMIT_BYTES: those that were not
used for longest go first.

Layout: a page of 4096 bytes that begins with the magic and tells where the header is and what its BLAKE2b digest is;
the arrays, each at a multiple of 4096 and padded with zeros to one; the header, as JSON. The digest of the arrays is
that of the sums (modulo 2^64) of every 512 little-endian uint64 words: it costs one reading of the memory, which the
first step would have to pay anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError

log = logging.getLogger("plait.cache")

LIMIT_BYTES = 16 << 30
# Left free on the disk, whatever the limit allows.
FREE_BYTES = 512 << 20
SUFFIX = ".plait"
_PARTIAL = ".partial-"
_MAGIC = b"plait-cache-1\n\0\0"
_PAGE = 4096
# Bytes written at a time. File systems that keep in large pages what was written at once (ext4 since Linux 6.16, XFS)
# map the weights with those, which are found faster.
_CHUNK = 8 << 20
_DIGEST_BYTES = 32
_START = struct.Struct(f"<{len(_MAGIC)}sQQ{_DIGEST_BYTES}s")  # magic, header's place and length, its digest
_MAX_HEADER_BYTES = 64 << 20
# Of a file, what its identity reads: both ends, and blocks spread evenly over what lies between them.
_HEAD_BYTES = 256 << 10
_TAIL_BYTES = 64 << 10
_SAMPLES = 8
_SAMPLE_BYTES = 4 << 10
_YOUNG_S = 60
_said: set[str] = set()


class CacheError(Exception):
    """An entry that cannot be read; the text says why."""


class UntrustedError(OSError):
    """A directory or an entry that others may have written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


@dataclass(frozen=True)
class Entry:
    """What an entry holds. arrays: uint8, read-only pages of the file, which stays mapped as long as they live."""

    facts: dict[str, Any]
    arrays: dict[str, NDArray[np.uint8]]
    nbytes: int


def directory() -> Path | None:
    """Where entries are kept; None where the user does without. UsageError for a PLAIT_CACHE that is no place."""
    chosen = os.environ.get("PLAIT_CACHE", "")
    if chosen == "none":
        return None
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise UsageError(
                f"PLAIT_CACHE={chosen}: there is no such user; name another directory, or none to do without"
            ) from None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "plait"
    except RuntimeError:  # nobody's home
        return None


def identity(files: list[Path]) -> list[list[Any]]:
    """What tells these files from all others and from their own later contents: resolved path, size, inode, the times
    of change (of the contents, and of the inode, which nobody can set back) and a digest of samples: both ends (headers
    begin there) and a few blocks between them. Raises OSError."""
    return [_file_identity(path.resolve()) for path in files]


def _file_identity(path: Path) -> list[Any]:
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        samples = _new_hash()
        for start, length in _sampled(status.st_size):
            file.seek(start)
            samples.update(file.read(length))
    return [
        str(path),
        status.st_size,
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
        samples.digest().hex(),
    ]


def _sampled(size: int) -> list[tuple[int, int]]:
    """Places and lengths of what is read of a file of this size."""
    if size <= _HEAD_BYTES + _TAIL_BYTES + _SAMPLES * _SAMPLE_BYTES:
        return [(0, size)]
    between = (size - _HEAD_BYTES - _TAIL_BYTES) // _SAMPLES
    middle = [(_HEAD_BYTES + i * between, _SAMPLE_BYTES) for i in range(_SAMPLES)]
    return [(0, _HEAD_BYTES), *middle, (size - _TAIL_BYTES, _TAIL_BYTES)]


def entry_name(kind: str, path: Path, *more: str) -> str:
    """The file name of an entry: one per kind, model file and option, so that a new one replaces the old one."""
    text = b"\0".join(os.fsencode(part) for part in (kind, str(path.resolve()), *more))  # names need not be UTF-8
    stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in path.stem)[:60]
    return f"{stem}-{kind}-{_digest(text).hex()[:16]}{SUFFIX}"


def read(name: str, key: Mapping[str, Any]) -> Entry | None:
    """The entry of this name, if it is there, whole, and was written under this key (JSON values).

    One that is not whole is said once and counts as absent. Using an entry makes it the last to be removed.
    """
    folder = directory()
    if folder is None:
        return None
    path = folder / name
    try:
        entry = _read(path, key)
    except FileNotFoundError:
        return None
    except UntrustedError as error:
        say_unwritten(error)
        return None
    except (CacheError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        say_unreadable(path, error)
        return None
    if entry is not None:
        with contextlib.suppress(OSError):
            os.utime(path)
    return entry


def _read(path: Path, key: Mapping[str, Any]) -> Entry | None:
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        _check_trust(path.parent, path.parent.stat())
        _check_trust(path, status)
        size = status.st_size
        magic, place, length, digest = _START.unpack(_exactly(file, _START.size))
        if magic != _MAGIC:
            raise CacheError("it is no entry of this cache")
        if place % _PAGE or place + length != size or not place or length > _MAX_HEADER_BYTES:
            raise CacheError("it is damaged or cut off")
        file.seek(place)
        text = _exactly(file, length)
        if _digest(text) != digest:
            raise CacheError("it is damaged")
        header = json.loads(text)
        if header["key"] != key:
            return None
        data = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    if _digest(_sums(data[_PAGE:place])).hex() != header["digest"]:
        raise CacheError("it is damaged")
    arrays = {name: data[offset : offset + nbytes] for name, offset, nbytes in header["arrays"]}
    return Entry(header["facts"], arrays, size)


def _check_trust(path: Path, status: os.stat_result) -> None:
    """UntrustedError where another user than this one or root owns what is at `path`, or may write it."""
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise UntrustedError(path, "it belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedError(path, "other users may write it (chmod go-w)")


def _exactly(file: Any, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise CacheError("it is cut off")
    return data


class Writer:
    """Writes one entry: `add` arrays, then `commit`. A context manager; what was not committed is removed at its end.

    nbytes: of all arrays, about. Raises OSError where the disk is full or read-only, or the entry too large.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        folder = directory()
        if folder is None:
            raise OSError("the cache is switched off")
        self.path = folder / name
        _check_room(folder, nbytes)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_trust(folder, folder.stat())
        _sweep(folder)
        self._arrays: list[tuple[str, int, int]] = []
        self._end = _PAGE
        self._hash = _new_hash()
        self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed by __exit__)
            dir=folder, prefix=_PARTIAL, suffix=SUFFIX, delete=False, buffering=0
        )
        _lock(self._file.fileno())
        self._pending = bytearray(_PAGE)  # of the file's end; the first page is written last

    def add(self, name: str, array: NDArray[np.uint8]) -> None:
        """Write an array, uint8 [bytes]."""
        self._arrays.append((name, self._end, array.nbytes))
        whole = array.nbytes // _PAGE * _PAGE
        self._write_pages(array[:whole])
        if whole < array.nbytes:
            last = np.zeros(_PAGE, np.uint8)
            last[: array.nbytes - whole] = array[whole:]
            self._write_pages(last)

    def _write_pages(self, data: NDArray[np.uint8]) -> None:
        self._write(data)
        self._hash.update(_sums(data))
        self._end += data.nbytes

    def _write(self, data: NDArray[np.uint8]) -> None:
        view = data.data
        while view:
            part = view[: _CHUNK - len(self._pending)]
            self._pending += part
            view = view[len(part) :]
            if len(self._pending) == _CHUNK:
                self._flush()

    def _flush(self) -> None:
        view = memoryview(self._pending)
        while view:
            view = view[self._file.write(view) :]
        self._pending = bytearray()

    def commit(self, key: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Put the entry in its place under a key, and remove others where all together have become too large."""
        header = {"key": key, "facts": facts, "arrays": self._arrays, "digest": self._hash.digest().hex()}
        text = json.dumps(header).encode()
        self._write(np.frombuffer(text, np.uint8))
        self._flush()
        self._file.seek(0)
        start = _START.pack(_MAGIC, self._end, len(text), _digest(text))
        self._write(np.frombuffer(start.ljust(_PAGE, b"\0"), np.uint8))
        self._flush()
        os.replace(self._file.name, self.path)
        _trim(self.path)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._file.name)  # it is gone where it was committed
        self._file.close()


def say_unreadable(path: Path, error: Exception) -> None:
    """Tell, once in a process, that an entry cannot be used."""
    _say_once(f"{path} is ignored and written anew: {_reason(error)}")


def say_unwritten(error: OSError) -> None:
    """Tell, once in a process, that the cache could not be written; work goes on without it."""
    if isinstance(error, UntrustedError):
        _say_once(f"{error.path} is not used as a cache: {error}")
        return
    _say_once(f"nothing is cached in {directory()}: {_reason(error)} (PLAIT_CACHE names another directory, or none)")


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.warning("%s", message)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _check_room(folder: Path, nbytes: int) -> None:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if nbytes > LIMIT_BYTES:
        raise OSError(f"{nbytes / 2**30:.1f} GiB are more than the cache may have ({LIMIT_BYTES >> 30} GiB)")
    if shutil.disk_usage(there).free < nbytes + FREE_BYTES:
        raise OSError(f"the disk has no room for {nbytes / 2**20:,.0f} MiB and {FREE_BYTES >> 20} MiB beside them")


def _trim(kept: Path) -> None:
    """Remove what was not used for longest until all entries fit below the limit."""
    entries = []
    for path in _entries(kept.parent):
        with contextlib.suppress(OSError):
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= LIMIT_BYTES:
            return
        if path != kept:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def _entries(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(_PARTIAL))


def _sweep(folder: Path) -> None:
    """Remove what writers left that were killed: nobody holds the lock any more. A young one may not be locked yet."""
    for path in folder.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError), path.open("rb+") as file:
            if os.fstat(file.fileno()).st_mtime < time.time() - _YOUNG_S and _lock(file.fileno()):
                path.unlink()


def _lock(descriptor: int) -> bool:
    """Whether the file's lock, which ends with its holder, could be taken."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sums(data: NDArray[np.uint8]) -> bytes:
    """The sums of every 512 words of whole pages."""
    words = data.view("<u8").reshape(-1, _PAGE // 8)
    return np.add.reduce(words, axis=1, dtype=np.uint64).astype("<u8", copy=False).tobytes()


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
