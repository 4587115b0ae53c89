"""Forks of a sequence: shared blocks, copies on write, and their counts."""

from __future__ import annotations

import numpy as np

from tests.memory.managers import FULL, cached_tokens, compute, manager_of, window


class TestForks:
    def start(self, manager, num_tokens):
        tokens = list(range(num_tokens))
        return compute(manager, manager.new_sequence(tokens), tokens), tokens

    def test_a_fork_costs_no_block(self):
        manager = manager_of(FULL, window(6))
        seq, _ = self.start(manager, 10)
        free = manager.num_free
        twin = manager.fork(seq)
        assert manager.num_free == free
        assert np.array_equal(manager.block_tables([seq]), manager.block_tables([twin]))
        manager.check_integrity([seq, twin])

    def test_the_first_writer_into_a_shared_block_copies_it_and_the_last_owner_does_not(self):
        manager = manager_of(FULL)
        seq, _ = self.start(manager, 6)
        shared = int(manager.block_tables([seq])[0, 0, 1])
        twin = manager.fork(seq)
        assert manager.allocate(twin, 7)
        assert manager.allocate(seq, 7)
        own = int(manager.block_tables([twin])[0, 0, 1])
        assert manager.take_copies().tolist() == [[shared, own]]
        assert int(manager.block_tables([seq])[0, 0, 1]) == shared != own
        assert manager.take_copies().shape == (0, 2)
        assert manager.stats.cow_copies == 1

    def test_whoever_writes_first_copies_be_it_the_parent(self):
        manager = manager_of(FULL)
        seq, _ = self.start(manager, 6)
        manager.fork(seq)
        assert manager.allocate(seq, 7)
        assert len(manager.take_copies()) == 1

    def test_a_fork_on_a_block_border_copies_nothing(self):
        manager = manager_of(FULL)
        seq, _ = self.start(manager, 8)
        twin = manager.fork(seq)
        assert manager.allocate(twin, 9)
        assert manager.allocate(seq, 9)
        assert len(manager.take_copies()) == 0

    def test_room_that_is_not_computed_yet_is_not_shared(self):
        manager = manager_of(FULL)
        seq, _ = self.start(manager, 4)
        assert manager.allocate(seq, 20)
        twin = manager.fork(seq)
        assert manager.block_tables([twin]).shape == (1, 1, 1)
        assert twin.capacity_tokens == 4

    def test_freeing_one_leaves_the_other_whole(self):
        manager = manager_of(FULL, window(3))
        seq, tokens = self.start(manager, 10)
        twin = manager.fork(seq)
        manager.free(seq)
        manager.check_integrity([twin])
        compute(manager, twin, [*tokens, 5, 5, 5])
        assert manager.stats.cow_copies == 0
        manager.free(twin)
        assert manager.num_free == 99

    def test_the_source_of_a_queued_copy_is_not_reused_before_the_copy(self):
        manager = manager_of(FULL, num_blocks=5)
        seq, _ = self.start(manager, 6)
        twin = manager.fork(seq)
        assert manager.allocate(twin, 7)
        manager.free(seq)
        source = manager.pool.copies[int(manager.block_tables([twin])[0, 0, 1])]
        manager.check_integrity([twin])
        assert manager.num_free == 1
        other = manager.new_sequence([9])
        assert manager.allocate(other, 4)
        assert not manager.allocate(other, 8)
        assert len(manager.take_copies()) == 1
        assert manager.allocate(other, 8)
        assert source in manager.block_tables([other])

    def test_the_copy_of_a_copy_reads_the_original(self):
        manager = manager_of(FULL)
        seq, _ = self.start(manager, 6)
        original = int(manager.block_tables([seq])[0, 0, 1])
        twin = manager.fork(seq)
        assert manager.allocate(twin, 7)
        third = manager.fork(twin)
        assert manager.allocate(third, 7)
        assert manager.take_copies()[:, 0].tolist() == [original, original]

    def test_a_copy_for_a_sequence_that_is_freed_is_dropped(self):
        manager = manager_of(FULL)
        seq, _ = self.start(manager, 6)
        twin = manager.fork(seq)
        assert manager.allocate(twin, 7)
        manager.free(twin)
        assert len(manager.take_copies()) == 0
        manager.check_integrity([seq])

    def test_a_cached_block_is_not_written_by_its_last_holder(self):
        """The parent fills the shared block and goes; the block is findable, so the twin continues in a copy."""
        manager = manager_of(FULL)
        tokens = list(range(8))
        seq = compute(manager, manager.new_sequence(tokens), tokens[:6])
        assert manager.allocate(seq, 8)
        twin = manager.fork(seq)  # while the parent's write is under way
        manager.take_copies()
        manager.commit(seq, tokens, 8)
        manager.free(seq)
        assert manager.allocate(twin, 7)
        assert len(manager.take_copies()) == 1
        assert cached_tokens(manager, [*tokens, 0]) == 8
