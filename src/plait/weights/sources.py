"""What a checkpoint offers, whatever its format: named tensors that are described first and read one at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from plait.errors import UsageError, WeightError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


# Not frozen, although nobody changes one: a large checkpoint has 100,000, and freezing triples the time to make them.
@dataclass(slots=True, unsafe_hash=True)
class TensorInfo:
    """One stored tensor, as the header describes it.

    shape: row-major, as torch has it. format: how the numbers are stored ("F32", "BF16", "Q4_1", ...).
    nbytes: stored bytes, which begin at byte `offset` of `file`. origin: of a weight that is made of several stored
    tensors, its quantised format for people ("GPTQ 4-bit"); `format` is then what its numbers fit into.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    file: str
    offset: int
    origin: str = ""


class TensorSource(Protocol):
    """A checkpoint that is open. Names are the file's own; nothing is read before `read`."""

    path: Path

    def names(self) -> list[str]:
        """Every tensor's name, in file order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """The description of a tensor; WeightError when there is none of that name."""
        ...

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor's values, expanded if they are quantised.

        dtype None keeps the stored type (quantised formats give float32). The result may be a copy-on-write view of
        the file: copy what must outlive `close`.
        """
        ...

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's stored bytes, [nbytes]: a read-only view of the mapped file. Needs no torch."""
        ...

    def release(self, name: str) -> None:
        """The tensor's bytes will not be wanted again soon: their pages need not stay in this process."""
        ...

    def close(self) -> None:
        """Release the files; reading afterwards is an error."""
        ...


def open_source(path: str | Path) -> TensorSource:
    """Open a .gguf file (any member of a split set), a .safetensors file or a directory of them."""
    path = Path(path)
    if not path.is_dir() and not path.name.endswith(".safetensors"):
        from plait.weights.gguf_source import GGUFSource

        return GGUFSource(path)
    from plait.weights.safetensors_source import SafetensorsSource

    return SafetensorsSource(path)


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a regular file, mapped read-only. Raises UsageError or, for an empty file, WeightError."""
    try:
        with open(path, "rb", opener=_open_regular) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise WeightError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file; a pipe or device is refused instead of waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"not a regular file: {path}")
    return descriptor


def close_maps(maps: dict[str, mmap.mmap]) -> None:
    """Unmap files and empty the dictionary. Views into them stay valid: a mapping goes with the last of them."""
    for data in maps.values():
        with contextlib.suppress(BufferError):
            data.close()
    maps.clear()


def release_pages(data: mmap.mmap, offset: int, nbytes: int) -> None:
    """Take the whole pages of this range of a mapped file out of the process; they can be read again all the same."""
    advice = getattr(mmap, "MADV_DONTNEED", None)
    first, last = -(-offset // mmap.PAGESIZE), (offset + nbytes) // mmap.PAGESIZE
    if advice is not None and first < last and not data.closed:
        data.madvise(advice, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def no_such_tensor(name: str, path: Path, known: list[str]) -> WeightError:
    """The error for a name that a checkpoint does not have, with the closest one that it has."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    hint = f"; nearest is {near[0]!r}" if near else ""
    return WeightError(f"{path}: no tensor named {name!r} among {len(known)}{hint}")


def some_names(names: list[str], limit: int = 4) -> str:
    """The first few names and how many more there are, for an error line."""
    shown = ", ".join(repr(name)[:200] for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


_RAW_SPLIT = re.compile(r"\.(part\d+(of\d+)?|parta[a-z]|split-?[a-z]|gguf-split-[a-z]|\d{3})$")


def is_raw_split(name: str) -> bool:
    """Whether a file name looks like one piece of a file that was cut into byte ranges."""
    return _RAW_SPLIT.search(name) is not None


def probable_cause(head: bytes) -> str:
    """What a file that is not a checkpoint most likely is, from its first bytes; "" when nothing is known."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git-LFS pointer, not the file itself: run `git lfs pull`, or download the file again"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it is an HTML page, most likely the error page of a failed download: download the file again"
    if text.startswith((b"{", b"[")):
        return "it is JSON, perhaps the error message of a failed download"
    for magic, cause in _MAGICS.items():
        if head.startswith(magic):
            return cause
    if head[8:9] == b"{":
        return "it looks like a safetensors file: give it the ending .safetensors"
    if head and not head.strip(b"\0"):
        return "its first bytes are all zero: the download did not complete"
    return ""


_MAGICS = {
    b"GGUF": "it is a GGUF file: give it the ending .gguf",
    b"FUGG": "its magic is FUGG, a byte-swapped GGUF: big-endian files are not supported",
    b"GGML": "it has the magic GGML, a format older than GGUF: convert the original model again",
    b"lmgg": "it has the magic ggml, a format older than GGUF: convert the original model again",
    b"fmgg": "it has the magic ggmf, a format older than GGUF: convert the original model again",
    b"tjgg": "it has the magic ggjt, a format older than GGUF: convert the original model again",
    b"PK\x03\x04": "it is a ZIP archive, perhaps a pickled PyTorch checkpoint: convert it to safetensors first",
    b"\x80\x02": "it is a Python pickle, which is never loaded: convert it to safetensors first",
    b"\x1f\x8b": "it is compressed with gzip: decompress it first",
    b"\x28\xb5\x2f\xfd": "it is compressed with zstd: decompress it first",
    b"\xfd7zXZ": "it is compressed with xz: decompress it first",
}
