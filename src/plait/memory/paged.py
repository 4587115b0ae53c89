"""Paged memory: keys and values in fixed-size blocks of one pool, reached through block tables. Serving.

A block is `layout.block_bytes` opaque bytes; only this file knows that the pool lies layer slot by layer slot
[group_layers, num_blocks, layer_bytes], each block of a slot holding block_tokens rows of keys and then of values.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import UsageError
from plait.memory.base import refuse_inputs
from plait.memory.layout import CacheGroup, CacheLayout
from plait.memory.paged_step import PagedStep, slot_views
from plait.memory.pages import reserve, resident_bytes
from plait.ops.step import StepInputs


class PagedMemory:
    """The pool. Block 0 is the null block: never written, so its rows stay zero.

    On the CPU the pool is an anonymous map: pages that no block has touched cost nothing.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype.itemsize != layout.bytes_per_number:
            raise UsageError(f"layout has {layout.bytes_per_number} bytes per number, {dtype} has {dtype.itemsize}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = torch.device(device)
        self.pool_bytes = num_blocks * layout.block_bytes
        if self.device.type == "cpu":
            flat = torch.from_numpy(reserve(self.pool_bytes))
        else:
            flat = torch.zeros(self.pool_bytes, dtype=torch.uint8, device=self.device)
        self._pool = flat[: self.pool_bytes].view(layout.group_layers, num_blocks, layout.layer_bytes)
        self.views: dict[int, tuple[int, Tensor, Tensor]] = {}
        for g, group in enumerate(layout.groups):
            for slot, layer in enumerate(group.layers):
                self.views[layer] = (g, *self._layer_views(group, slot))

    def _layer_views(self, group: CacheGroup, slot: int) -> tuple[Tensor, Tensor]:
        return slot_views(self._pool[slot].view(self.dtype), group)

    def begin(self, ids: Tensor, inputs: StepInputs | None) -> PagedStep:
        if inputs is None or inputs.sequences is None or inputs.sequences.block_table is None or ids.ndim != 1:
            raise UsageError("paged memory needs flat ids [N] and sequences with a block table")
        refuse_inputs(inputs, "paged memory", "token_mask", "segment_ids", "adapter_ids")
        sequences = inputs.sequences
        self.copy_blocks(sequences.copies)
        step = PagedStep(self.layout, self.views, sequences, self.device)
        positions = inputs.positions
        step.positions = torch.from_numpy(sequences.positions()) if positions is None else torch.as_tensor(positions)
        step.positions = step.positions.to(self.device)
        step._reach = None if inputs.reach is None else torch.as_tensor(inputs.reach).to(self.device)
        return step

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks, (source, destination) in order."""
        for source, target in pairs.tolist():
            self._pool[:, target] = self._pool[:, source]

    def read_block(self, block: int) -> bytes:
        """The bytes of a block, in the order that `write_block` takes."""
        return self._pool[:, block].cpu().numpy().tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        """Put back what `read_block` gave."""
        numbers = np.frombuffer(data, np.uint8).reshape(self._pool.shape[0], -1).copy()
        self._pool[:, block] = torch.from_numpy(numbers).to(self.device)

    def touched_bytes(self) -> int | None:
        """Bytes of the pool that lie in memory now; None where the platform does not say."""
        if self.device.type != "cpu":
            return None
        return resident_bytes(self._pool.data_ptr(), self._pool.nbytes)
