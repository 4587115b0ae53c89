"""The proof that the block manager's books agree with each other, recomputed from the live sequences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from plait.errors import EngineError
from plait.memory.block_pool import NULL_BLOCK, BlockPool
from plait.memory.layout import CacheLayout
from plait.memory.prefix_cache import PrefixCache, first_visible_block

if TYPE_CHECKING:
    from plait.memory.blocks import SequenceBlocks


def check_manager(
    layout: CacheLayout, pool: BlockPool, cache: PrefixCache, live: list[SequenceBlocks], epoch: int
) -> None:
    """Raise EngineError at the first thing that does not agree."""
    for number, seq in enumerate(live):
        _check_sequence(layout, seq, f"sequence {number}")
    _check_counts(layout, pool, live)
    _check_states(pool)
    _check_cache(pool, cache, [seq for seq in live if seq.epoch == epoch])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EngineError(f"block manager integrity: {message}")


def _check_sequence(layout: CacheLayout, seq: SequenceBlocks, name: str) -> None:
    _require(not seq.freed, f"{name} is freed but counted as live")
    _require(seq.num_computed <= seq.capacity_tokens, f"{name} has computed more tokens than it has blocks for")
    for g, group in enumerate(layout.groups):
        first, end = seq.first_block[g], seq.num_blocks[g]
        row = seq.table[g]
        visible = first_visible_block(seq.num_computed, group.cache.window, group.block_tokens)
        _require(first == visible, f"{name}, group {g}: block {first} is the first held, {visible} the first visible")
        _require(bool((row[first:end] != NULL_BLOCK).all()), f"{name}, group {g}: a visible block is missing")
        _require(not row[:first].any() and not row[end:].any(), f"{name}, group {g}: blocks outside its range")


def _check_counts(layout: CacheLayout, pool: BlockPool, live: list[SequenceBlocks]) -> None:
    counts: Counter[int] = Counter()
    group_of: dict[int, int] = {}
    for number, seq in enumerate(live):
        blocks = seq.table[seq.table != NULL_BLOCK].tolist()
        _require(len(set(blocks)) == len(blocks), f"sequence {number} has one block in two places")
        counts.update(blocks)
        for g in range(len(layout.groups)):
            for block in seq.table[g][seq.table[g] != NULL_BLOCK].tolist():
                _require(group_of.setdefault(block, g) == g, f"block {block} is in groups {group_of[block]} and {g}")
    for block, count in enumerate(pool.ref_count):
        _require(counts[block] == count, f"block {block} has {count} references, {counts[block]} are in use")
    for block, entry in enumerate(pool.entries):
        if entry is not None and block in group_of:
            tree, _, slot = entry
            _require(tree.groups[slot] == group_of[block], f"block {block} is cached for another group than it serves")


def _check_states(pool: BlockPool) -> None:
    held = {block for block, count in enumerate(pool.ref_count) if count}
    states = Counter([*pool.free, *pool.cached, *pool.deferred, *held])
    _require(states[NULL_BLOCK] == 0 and pool.entries[NULL_BLOCK] is None, "the null block is in use")
    for block in range(1, pool.num_blocks):
        _require(states[block] == 1, f"block {block} is in {states[block]} of free, cached, deferred and held, not 1")
    total = len(pool.free) + len(pool.cached) + len(pool.deferred) + len(held)
    _require(total == pool.num_blocks - 1, f"free + cached + deferred + held = {total}, not {pool.num_blocks - 1}")
    for block in pool.free:
        _require(pool.entries[block] is None, f"block {block} is free but listed in the prefix cache")
    for block in pool.cached:
        _require(pool.entries[block] is not None, f"block {block} is cached but not listed")
    sources = set(pool.copies.values())
    _require(not sources & pool.copies.keys(), "a block is source and destination of queued copies")
    for block in pool.deferred.keys() | pool.copies.keys() | sources:
        _require(block not in states or states[block] == 1, f"block {block} of a queued copy has no state")
    _require(not sources & {*pool.free, *pool.cached}, "the source of a queued copy could be handed out")
    _require(pool.copies.keys() <= held, "the destination of a queued copy is not held")


def _check_cache(pool: BlockPool, cache: PrefixCache, cached_sequences: list[SequenceBlocks]) -> None:
    listed = 0
    cursors = Counter(id(node) for seq in cached_sequences for node in seq.cursors)
    for tree in cache.trees:
        pending = list(tree.roots.values())
        while pending:
            node = pending.pop()
            pending += node.children.values()
            _require(cursors.pop(id(node), 0) == node.cursors, "a prefix node counts the wrong number of sequences")
            _require(bool(node.cursors or node.children or any(node.blocks)), "a prefix node is kept for nothing")
            for key, child in node.children.items():
                _require(child.parent is node and child.key == key, "a prefix node is listed in the wrong place")
            for slot, block in enumerate(node.blocks):
                if block != NULL_BLOCK:
                    listed += 1
                    _require(pool.entries[block] == (tree, node, slot), f"block {block} and its prefix node disagree")
    _require(listed == sum(entry is not None for entry in pool.entries), "a listed block is in no prefix tree")
    _require(not cursors, "a sequence stands at a prefix node that is in no tree")
