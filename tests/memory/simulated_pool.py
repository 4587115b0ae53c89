"""A pool whose blocks hold a name for the keys and values written there, so that a wrong read shows.

The name of position p is that of the whole prefix up to p (tokens, salt, weights version, group), as
keys and values depend on all of it. Nothing of the block manager's own books is used to judge it.
"""

from __future__ import annotations

import numpy as np

from plait.memory.blocks import BlockManager, SequenceBlocks


class Prefixes:
    """Numbers for (group, salt, version, tokens): equal numbers iff equal prefixes."""

    def __init__(self):
        self._ids = {}

    def _id(self, key):
        return self._ids.setdefault(key, len(self._ids) + 1)

    def of(self, group, sequence):
        """The names of all positions of `sequence` in `group`; tokens are only ever appended."""
        names = sequence.names.setdefault(group, [])
        last = names[-1] if names else self._id((group, sequence.origin))
        for token in sequence.tokens[len(names) :]:
            last = self._id((last, token))
            names.append(last)
        return names


class Sequence:
    """A live sequence of the model: what it should hold, beside what the manager says."""

    def __init__(self, blocks: SequenceBlocks, tokens, origin):
        self.blocks, self.tokens, self.origin = blocks, list(tokens), origin
        self.names = {}


class SimulatedPool:
    """Carries out steps against a BlockManager and compares every visible slot with what was written."""

    def __init__(self, manager: BlockManager):
        self.manager = manager
        self.groups = manager.layout.groups
        self.slots = np.zeros((manager.num_blocks, max(g.block_tokens for g in self.groups)), np.int64)
        self.prefixes = Prefixes()
        self.live: list[Sequence] = []

    def start(self, tokens, salt=(), version=0, use_cache=True) -> Sequence:
        sequence = Sequence(self.manager.new_sequence(tokens, salt, use_cache), tokens, (salt, version))
        self.live.append(sequence)
        assert sequence.blocks.num_cached_tokens <= max(len(tokens) - 1, 0)
        self.check(sequence, sequence.blocks.num_computed)
        return sequence

    def fork(self, sequence) -> Sequence:
        twin = Sequence(self.manager.fork(sequence.blocks), sequence.tokens, sequence.origin)
        self.live.append(twin)
        return twin

    def free(self, sequence):
        self.live.remove(sequence)
        self.manager.free(sequence.blocks)

    def execute(self, plan):
        """One forward: plan is [(sequence, total tokens after it)], all allocated."""
        copies = self.manager.take_copies()
        backwards = self.slots.copy()
        for source, destination in reversed(copies):
            backwards[destination] = backwards[source]
        self.slots[copies[:, 1]] = self.slots[copies[:, 0]]
        assert (backwards == self.slots).all(), "the result depends on the order of the copies"
        tables = self.manager.block_tables([sequence.blocks for sequence, _ in plan])
        for s, (sequence, total) in enumerate(plan):
            for g, group in enumerate(self.groups):
                names = self.prefixes.of(g, sequence)
                for position in range(sequence.blocks.num_computed, total):
                    block = tables[g, s, position // group.block_tokens]
                    assert block != 0, "a write would go to the null block"
                    self.slots[block, position % group.block_tokens] = names[position]
        for sequence, total in plan:
            self.check(sequence, total)
        for sequence, total in plan:
            self.manager.commit(sequence.blocks, sequence.tokens, total)
        assert not self.slots[0].any()

    def check(self, sequence, total):
        """All that the queries num_computed .. total - 1 (or the next one) see reads as it was computed."""
        table = self.manager.block_tables([sequence.blocks])[:, 0]
        for g, group in enumerate(self.groups):
            window = group.cache.window
            first = max(sequence.blocks.num_computed - window + 1, 0) if window else 0
            names = self.prefixes.of(g, sequence)
            for position in range(first, total):
                block, row = table[g, position // group.block_tokens], position % group.block_tokens
                assert self.slots[block, row] == names[position], f"group {g}, position {position} reads wrong"
            assert not table[g, : first // group.block_tokens].any(), "a dead block is still in the table"

    def check_all(self):
        self.manager.check_integrity([sequence.blocks for sequence in self.live])
        for sequence in self.live:
            self.check(sequence, sequence.blocks.num_computed)
