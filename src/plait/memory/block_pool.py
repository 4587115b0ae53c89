"""Who holds which block of the pool: reference counts, the free list, and copies that are still to be made."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from plait.errors import EngineError
from plait.memory.prefix_cache import PrefixNode, PrefixTree

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 .. num_blocks - 1; every one is in exactly one of four states.

    held: ref_count > 0. free: content worthless. cached: ref_count 0, but its content can still be
    found in a prefix tree; reused when no block is free, least recently released first. deferred:
    released while a queued copy still reads it; free or cached again once the copies are taken.
    Block 0, the null block, is in none of them: it is never handed out, counted, written or freed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        # The most recently freed block first: its pages are in use already, untouched ones cost nothing.
        self.free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.deferred: dict[int, None] = {}
        # Where each block's content is listed: (tree, node, slot in node.blocks).
        self.entries: list[tuple[PrefixTree, PrefixNode, int] | None] = [None] * num_blocks
        self.copies: dict[int, int] = {}  # destination -> source
        self._copy_sources: set[int] = set()
        self.evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that take() can hand out now."""
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A block with one reference and worthless content; the caller has checked num_available."""
        if self.free:
            block = self.free.pop()
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            self._forget(block)
            self.evictions += 1
        else:
            raise EngineError("no block left in the key/value pool; ask can_allocate() first")
        self.ref_count[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a held, cached or deferred block."""
        if self.ref_count[block] == 0:
            self.cached.pop(block, None)
            self.deferred.pop(block, None)
        self.ref_count[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one makes the block free, cached or deferred."""
        count = self.ref_count[block] - 1
        if count < 0:
            raise EngineError(f"block {block} was released more often than it was taken")
        self.ref_count[block] = count
        if count:
            return
        self.copies.pop(block, None)  # nobody is left to read the copy
        if block in self._copy_sources:
            self.deferred[block] = None
        else:
            self._retire(block)

    def writable(self, block: int) -> bool:
        """Whether its only holder may write into the block: neither shared nor listed in the prefix cache."""
        return self.ref_count[block] == 1 and self.entries[block] is None

    def take_copy(self, source: int) -> int:
        """A new block that will hold the content of `source`, by way of a queued copy."""
        source = self.copies.get(source, source)  # the copy of a copy that was not made yet
        block = self.take()
        self.copies[block] = source
        self._copy_sources.add(source)
        return block

    def take_copies(self) -> NDArray[np.int32]:
        """Queued copies, int32 [C, 2] of (source, destination); the queue is empty afterwards."""
        pairs = np.array([(source, block) for block, source in self.copies.items()], dtype=np.int32).reshape(-1, 2)
        self.copies.clear()
        self._copy_sources.clear()
        for block in self.deferred:
            self._retire(block)
        self.deferred.clear()
        return pairs

    def list_content(self, block: int, tree: PrefixTree, node: PrefixNode, slot: int) -> None:
        """Make a full, computed block findable, unless the node has a block with this content: that one stays."""
        if not node.blocks[slot] and self.entries[block] is None:
            node.blocks[slot] = block
            self.entries[block] = (tree, node, slot)

    def forget(self, block: int) -> None:
        """A listed block's content can not be found any more; a cached block becomes free, a held one stays held."""
        self._forget(block)
        if block in self.cached:
            del self.cached[block]
            self.free.append(block)

    def forget_all(self) -> None:
        """No content can be found any more; held blocks stay held, the trees are cleared by the caller."""
        self.entries = [None] * self.num_blocks
        self.free.extend(reversed(self.cached))
        self.cached.clear()

    def _retire(self, block: int) -> None:
        if self.entries[block] is None:
            self.free.append(block)
        else:
            self.cached[block] = None

    def _forget(self, block: int) -> None:
        entry = self.entries[block]
        if entry is not None:
            tree, node, slot = entry
            node.blocks[slot] = NULL_BLOCK
            self.entries[block] = None
            tree.prune(node)
