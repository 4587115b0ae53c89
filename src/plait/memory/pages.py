"""Memory that costs nothing until it is touched: the pages of key/value pools. No torch."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

from plait.errors import CapacityError


def reserve(num_bytes: int) -> NDArray[np.uint8]:
    """An anonymous map as uint8 [num_bytes], all zero. Raises CapacityError where the system refuses the size."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        size = f"{num_bytes / 2**30:,.0f} GiB"
        raise CapacityError(f"a key/value pool of {size} cannot be reserved ({error}): lower --kv-memory") from None
    return np.frombuffer(pages, np.uint8)[:num_bytes]


def resident_bytes(address: int, num_bytes: int) -> int | None:
    """Bytes of the pages of [address, address + num_bytes) that are in memory, asked of the kernel (mincore).

    None where the platform does not say. Not from the process's list of maps: the kernel merges neighbouring maps, so
    a neighbour's pages would count too.
    """
    try:
        library = ctypes.CDLL(None, use_errno=True)
        page = mmap.PAGESIZE
        start = address // page * page
        length = address + num_bytes - start
        states = np.empty(-(-length // page), np.uint8)
        failed = library.mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(length), states.ctypes.data_as(ctypes.c_char_p)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else int(np.count_nonzero(states & 1)) * page
