"""The key/value pool of a native plan: blocks of an anonymous map, laid out as csrc/plait_native.h says. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plait.memory.layout import CacheLayout
from plait.memory.pages import reserve, resident_bytes


class NativePool:
    """num_blocks blocks of layout.block_bytes bytes: [group_layers, num_blocks, layer_bytes].

    Block 0 is the null block: never written, so it stays zero. Pages that no block has touched cost nothing. Raises
    CapacityError where the system refuses the size.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.pool_bytes = num_blocks * layout.block_bytes
        flat = reserve(self.pool_bytes)
        self.pages: NDArray[np.uint8] = flat.reshape(layout.group_layers, num_blocks, layout.layer_bytes)

    @property
    def address(self) -> int:
        return int(self.pages.ctypes.data)

    @property
    def slot_stride(self) -> int:
        """Bytes from a block in one layer slot to the same block in the next."""
        return self.num_blocks * self.layout.layer_bytes

    def layer_address(self, layer: int) -> int:
        """Address of block 0 of a model layer; block b lies layout.layer_bytes * b further on."""
        return self.address + self.layout.slot(layer)[1] * self.slot_stride

    def read_block(self, block: int) -> bytes:
        """The bytes of a block, in the order that `write_block` takes."""
        return self.pages[:, block].tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        """Put back what `read_block` gave."""
        self.pages[:, block] = np.frombuffer(data, np.uint8).reshape(len(self.pages), -1)

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks, (source, destination) in order."""
        for source, target in pairs.tolist():
            self.pages[:, target] = self.pages[:, source]

    def touched_bytes(self) -> int | None:
        """Bytes of the pool that lie in memory now; None where the platform does not say."""
        return resident_bytes(self.address, self.pool_bytes)
