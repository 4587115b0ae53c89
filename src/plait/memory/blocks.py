"""Paged key/value memory, the accounting: which pool block holds which tokens of which sequence.

Only numbers are kept here; the contents belong to the memory that writes and attends. One step of an
engine calls, in this order:

1. `new_sequence` for every request that starts, `fork` and `free` as needed,
2. `allocate(seq, total)` for every sequence of the step; on False free a victim and try again,
3. `copies = take_copies()`, `block_tables(seqs)`,
4. the forward: first the copies, then the writes of keys and values,
5. `commit(seq, tokens, num_computed)` for every sequence of the step.

Several steps may be made as one, with blocks for all of them allocated before (`allocate_unused`); `trim` gives back
those that were not reached.

Copies: no block is both a source and a destination of the copies of one step and every destination
is there once, so they may be made in any order or all at once, as long as it is before the writes. A
source that is freed between 2 and 3 is not handed out again before `take_copies`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.errors import EngineError
from plait.memory.block_pool import NULL_BLOCK, BlockPool
from plait.memory.integrity import check_manager
from plait.memory.layout import CacheLayout
from plait.memory.prefix_cache import PrefixCache, PrefixNode, first_visible_block

Int32 = NDArray[np.int32]


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    """The blocks of one sequence. Only the manager changes it; num_computed and num_cached_tokens are for all to read.

    table: int32 [G, capacity]; block ids in position order, 0 before first_block and from num_blocks on.
    num_blocks: per group, table columns in use (recycled ones included). first_block: per group, the
    first column that has not been recycled. num_computed: tokens whose keys and values are written for
    good. num_cached_tokens: those of them that came from the prefix cache at the start.
    """

    table: Int32
    num_blocks: list[int]
    first_block: list[int]
    num_computed: int
    num_cached_tokens: int
    cursors: list[PrefixNode]  # per prefix tree: node of the last full block; empty: not (any longer) cached
    num_listed: list[int]  # per prefix tree: full blocks passed by the cursor
    epoch: int
    capacity_tokens: int = 0  # tokens for which every group has room
    next_event: int = 0  # num_computed at which a block becomes full or leaves a window
    may_share: bool = False  # the block that is written next may belong to a fork too
    freed: bool = False


@dataclass
class BlockStats:
    """Totals since the start. The prefix numbers are tokens asked for and found by new_sequence."""

    prefix_queries_tokens: int = 0
    prefix_hit_tokens: int = 0
    recycled_blocks: int = 0
    cow_copies: int = 0
    evictions: int = 0


class BlockManager:
    """Hands the blocks of one pool to the sequences of all groups.

    num_blocks: blocks of the pool, null block 0 included. chunk_tokens: the most tokens that one step
    adds to a sequence; with it windowed groups hold at most layout's group_blocks() blocks.
    Raises EngineError where the order of calls is broken; a full pool is not an error but False.
    """

    def __init__(
        self, layout: CacheLayout, num_blocks: int, prefix_caching: bool = True, chunk_tokens: int = 512
    ) -> None:
        if num_blocks < 2:
            raise EngineError(f"a pool of {num_blocks} blocks has none beside the null block; give it more memory")
        self.layout = layout
        self.num_blocks = num_blocks
        self.chunk_tokens = chunk_tokens
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(layout.groups)
        self._prefix_caching = prefix_caching
        self._weights_version: Hashable = 0
        self._epoch = 0  # sequences that began before the last reset are not cached
        self._stats = BlockStats()
        self._block_tokens = [group.block_tokens for group in layout.groups]
        self._windows = [(g, group.cache.window) for g, group in enumerate(layout.groups) if group.cache.window]

    # Capacity

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones that nobody holds."""
        return self.pool.num_available

    @property
    def usage(self) -> float:
        """Share of the pool that sequences hold, 0 to 1."""
        return 1 - self.num_free / (self.num_blocks - 1)

    @property
    def stats(self) -> BlockStats:
        self._stats.evictions = self.pool.evictions
        return self._stats

    @property
    def recycles(self) -> bool:
        """Whether commit() may take blocks away, because there are windowed groups."""
        return bool(self._windows)

    def fits(self, total_tokens: int) -> bool:
        """Whether a sequence of `total_tokens` tokens can be served when it is alone."""
        return self.max_sequences(total_tokens) > 0

    def max_sequences(self, total_tokens: int) -> int:
        """Sequences of `total_tokens` tokens that the pool holds at once, nothing shared."""
        return (self.num_blocks - 1) // max(self.layout.blocks_per_sequence(total_tokens, self.chunk_tokens), 1)

    # Life of a sequence

    def new_sequence(
        self, tokens: Sequence[int] | NDArray[np.integer], salt: tuple[Hashable, ...] = (), use_cache: bool = True
    ) -> SequenceBlocks:
        """Begin a sequence; what the prefix cache holds of `tokens` is referenced at once.

        salt: whatever else keys and values depend on, as tagged values: ("adapter", digest), ("rope", name),
        ("salt", text). use_cache False: no hit is taken (a request for prompt_logprobs needs every logit),
        the blocks are listed for others all the same. num_computed starts at num_cached_tokens, a
        multiple of every group's block and at most len(tokens) - 1.
        """
        ids = np.asarray(tokens, dtype=np.int32)
        num_groups = len(self._block_tokens)
        columns = len(ids) // min(self._block_tokens) + 2
        seq = SequenceBlocks(
            np.zeros((num_groups, columns), np.int32), [0] * num_groups, [0] * num_groups, 0, 0, [], [], self._epoch
        )
        if self._prefix_caching:
            key = (self._weights_version, salt)
            if use_cache:
                self._take_hit(seq, key, ids)
            if not seq.cursors:
                seq.cursors = [tree.root(key) for tree in self.cache.trees]
                seq.num_listed = [0] * len(seq.cursors)
            for node in seq.cursors:
                node.cursors += 1
        self._settle(seq)
        return seq

    def _take_hit(self, seq: SequenceBlocks, key: Hashable, ids: Int32) -> None:
        hit, paths = self.cache.longest_hit(key, ids)
        self._stats.prefix_queries_tokens += len(ids)
        self._stats.prefix_hit_tokens += hit
        if not hit:
            return
        for tree, path in zip(self.cache.trees, paths, strict=True):
            for slot, g in enumerate(tree.groups):
                window = self.layout.groups[g].cache.window
                first = first_visible_block(hit, window, tree.block_tokens)
                seq.num_blocks[g], seq.first_block[g] = len(path), first
                for column in range(first, len(path)):
                    block = path[column].blocks[slot]
                    self.pool.share(block)
                    seq.table[g, column] = block
        seq.num_computed = seq.num_cached_tokens = hit
        seq.cursors = [path[-1] for path in paths]
        seq.num_listed = [len(path) for path in paths]

    def fork(self, seq: SequenceBlocks) -> SequenceBlocks:
        """A second sequence with the same computed tokens, on the same blocks; whoever writes first copies."""
        self._check_live(seq)
        num_blocks = [-(-seq.num_computed // size) for size in self._block_tokens]
        table = np.zeros_like(seq.table)
        for g, count in enumerate(num_blocks):
            table[g, :count] = seq.table[g, :count]
        for block in table[table != NULL_BLOCK].tolist():
            self.pool.share(block)
        twin = SequenceBlocks(
            table,
            num_blocks,
            list(seq.first_block),
            seq.num_computed,
            seq.num_cached_tokens,
            list(seq.cursors),
            list(seq.num_listed),
            seq.epoch,
            may_share=True,
        )
        seq.may_share = True
        for node in twin.cursors:
            node.cursors += 1
        self._settle(twin)
        return twin

    def free(self, seq: SequenceBlocks, forget: bool = False) -> None:
        """Give all blocks back. Those in the prefix cache stay findable, and of them the tail is reused first.

        forget: the content is bad. Every block of this prefix, whoever computed it, leaves the prefix cache, and what
        continues the prefix beyond its last full block does so too; live sequences keep their blocks.
        """
        self._check_live(seq)
        seq.freed = True
        if forget and seq.epoch == self._epoch:
            for tree, node in zip(self.cache.trees, seq.cursors, strict=False):
                for block in tree.blocks_along(node):
                    self.pool.forget(block)
        groups, columns = np.nonzero(seq.table)
        position = columns * np.array(self._block_tokens)[groups]
        tail_first = np.argsort(-position, kind="stable")
        for block in seq.table[groups, columns][tail_first].tolist():
            self.pool.release(block)
        seq.table[:] = NULL_BLOCK
        for tree, node in zip(self.cache.trees, seq.cursors, strict=False):
            node.cursors -= 1
            tree.prune(node)
        seq.cursors = []

    # One step

    def can_allocate(self, seq: SequenceBlocks, total_tokens: int) -> bool:
        """Whether allocate() would succeed now."""
        return self._missing_blocks(seq, total_tokens) <= self.num_free

    def allocate(self, seq: SequenceBlocks, total_tokens: int) -> bool:
        """Make room for tokens num_computed .. total_tokens - 1; False, and nothing changed, if blocks are too few.

        A block to be written that a fork or the prefix cache holds too is replaced by a copy, which is queued.
        """
        if total_tokens <= seq.capacity_tokens and not (seq.may_share or seq.freed):
            return True
        if self._missing_blocks(seq, total_tokens) > self.num_free:
            return False
        if seq.may_share:
            for g, column in self._shared_writes(seq):
                block = int(seq.table[g, column])
                seq.table[g, column] = self.pool.take_copy(block)
                self.pool.release(block)
                self._stats.cow_copies += 1
            seq.may_share = False
        columns = max(-(-total_tokens // size) for size in self._block_tokens)
        if columns > seq.table.shape[1]:
            grown = np.zeros((len(self._block_tokens), max(columns, 2 * seq.table.shape[1])), np.int32)
            grown[:, : seq.table.shape[1]] = seq.table
            seq.table = grown
        for g, size in enumerate(self._block_tokens):
            for column in range(seq.num_blocks[g], -(-total_tokens // size)):
                seq.table[g, column] = self.pool.take()
                seq.num_blocks[g] = column + 1
        self._settle(seq)
        return True

    def allocate_unused(self, totals: Sequence[tuple[SequenceBlocks, int]]) -> bool:
        """allocate() for all of these (sequence, total_tokens), or for none: out of blocks with worthless content.

        For tokens that may never come: nothing leaves the prefix cache for them. trim() gives back what was too much.
        """
        if sum(self._missing_blocks(seq, total) for seq, total in totals) > len(self.pool.free):
            return False
        for seq, total in totals:
            self.allocate(seq, total)
        return True

    def trim(self, seq: SequenceBlocks, total_tokens: int) -> None:
        """Give back blocks that hold nothing: those beyond the first `total_tokens` tokens, or beyond the computed ones
        where these are more."""
        self._check_live(seq)
        for g, size in enumerate(self._block_tokens):
            needed = -(-max(total_tokens, seq.num_computed) // size)
            for column in range(needed, seq.num_blocks[g]):
                self.pool.release(int(seq.table[g, column]))
                seq.table[g, column] = NULL_BLOCK
            seq.num_blocks[g] = min(seq.num_blocks[g], needed)
        self._settle(seq)

    def take_copies(self) -> Int32:
        """Copies queued since the last call, int32 [C, 2] of (source, destination): to be made before any write."""
        return self.pool.take_copies()

    def block_tables(self, seqs: Sequence[SequenceBlocks]) -> Int32:
        """int32 [G, S, B]: each sequence's block ids in position order, 0 where a block was recycled or does not exist.

        B is the longest sequence's number of blocks. The array is the caller's: later calls do not change it.
        """
        width = max((max(seq.num_blocks) for seq in seqs), default=0)
        tables = np.zeros((len(self._block_tokens), len(seqs), width), np.int32)
        for s, seq in enumerate(seqs):
            own = seq.table[:, :width]
            tables[:, s, : own.shape[1]] = own
        return tables

    def commit(self, seq: SequenceBlocks, tokens: Sequence[int] | NDArray[np.integer], num_computed: int) -> None:
        """Keys and values below `num_computed` are written and stay: list full blocks, recycle those out of a window.

        tokens: all ids of the sequence, at least num_computed of them; only those of newly filled blocks are read.
        """
        if seq.freed or not seq.num_computed <= num_computed <= min(len(tokens), seq.capacity_tokens):
            self._check_live(seq)
            raise EngineError(
                f"cannot commit {num_computed} tokens: {seq.num_computed} are committed, {len(tokens)} known and "
                f"{seq.capacity_tokens} allocated; allocate() first, and never commit what may be rolled back"
            )
        if self.pool.copies:
            raise EngineError("copies are still queued at commit(); make those of take_copies() before any write")
        seq.num_computed = num_computed
        if num_computed < seq.next_event:
            return
        if seq.cursors and seq.epoch == self._epoch:
            self._list_full_blocks(seq, tokens)
        for g, window in self._windows:
            self._recycle(seq, g, first_visible_block(num_computed, window, self._block_tokens[g]))
        self._settle(seq)

    # The cache as a whole

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Live sequences keep their blocks, which are not listed from now on."""
        self.pool.forget_all()
        self.cache.clear()
        self._epoch += 1

    def set_weights_version(self, version: Hashable) -> None:
        """Name the weights that keys and values are computed with from now on; another version drops the cache."""
        if version != self._weights_version:
            self._weights_version = version
            self.reset_prefix_cache()

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Prove that free + held + cached = all and every count right; `live`: all sequences that are not freed.

        Raises EngineError saying what is wrong. Time grows with the pool: for tests and idle moments.
        """
        check_manager(self.layout, self.pool, self.cache, list(live), self._epoch)

    # Private

    @staticmethod
    def _check_live(seq: SequenceBlocks) -> None:
        if seq.freed:
            raise EngineError("the sequence was freed already; begin a new one with new_sequence()")

    def _missing_blocks(self, seq: SequenceBlocks, total_tokens: int) -> int:
        self._check_live(seq)
        chunk = total_tokens - seq.num_computed
        if self._windows and chunk > self.chunk_tokens:
            raise EngineError(
                f"a step may add {self.chunk_tokens} tokens to a sequence, not {chunk}: windowed groups are sized for "
                "that; use smaller chunks or a larger chunk_tokens"
            )
        grow = sum(
            max(-(-total_tokens // size) - count, 0)
            for size, count in zip(self._block_tokens, seq.num_blocks, strict=True)
        )
        return grow + (len(self._shared_writes(seq)) if seq.may_share else 0)

    def _shared_writes(self, seq: SequenceBlocks) -> list[tuple[int, int]]:
        """(group, column) of partly filled blocks that `seq` would write next but may not. Later ones are its own."""
        shared = []
        for g, size in enumerate(self._block_tokens):
            column, filled = divmod(seq.num_computed, size)
            if filled and not self.pool.writable(int(seq.table[g, column])):
                shared.append((g, column))
        return shared

    def _list_full_blocks(self, seq: SequenceBlocks, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        for t, tree in enumerate(self.cache.trees):
            size, before = tree.block_tokens, seq.cursors[t]
            node = before
            for column in range(seq.num_listed[t], seq.num_computed // size):
                node = tree.child(node, tokens[column * size : (column + 1) * size])
                for slot, g in enumerate(tree.groups):
                    block = int(seq.table[g, column])
                    self.pool.list_content(block, tree, node, slot)
            if node is not before:
                node.cursors += 1
                before.cursors -= 1
                tree.prune(before)
                seq.cursors[t], seq.num_listed[t] = node, seq.num_computed // size

    def _recycle(self, seq: SequenceBlocks, g: int, first: int) -> None:
        for column in range(seq.first_block[g], first):
            self.pool.release(int(seq.table[g, column]))
            seq.table[g, column] = NULL_BLOCK
            self._stats.recycled_blocks += 1
            seq.first_block[g] = column + 1

    def _settle(self, seq: SequenceBlocks) -> None:
        """Recompute the two thresholds that let most steps return at once."""
        sizes = self._block_tokens
        seq.capacity_tokens = min(count * size for count, size in zip(seq.num_blocks, sizes, strict=True))
        events = [(seq.first_block[g] + 1) * sizes[g] + window - 1 for g, window in self._windows]
        if seq.cursors and seq.epoch == self._epoch:
            events += [
                (listed + 1) * tree.block_tokens for listed, tree in zip(seq.num_listed, self.cache.trees, strict=True)
            ]
        seq.next_event = min(events, default=1 << 62)
