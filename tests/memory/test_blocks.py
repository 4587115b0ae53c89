from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from plait.errors import EngineError
from plait.memory.blocks import BlockManager
from plait.memory.layout import make_layout
from tests.memory.managers import FULL, compute, manager_of, window
from tests.memory.simulated_pool import SimulatedPool


def test_blocks_come_one_per_block_tokens_and_go_back():
    manager = manager_of(FULL, num_blocks=10)
    seq = manager.new_sequence(range(9))
    assert manager.num_free == 9
    for tokens, blocks in [(1, 1), (4, 1), (5, 2), (9, 3)]:
        assert manager.allocate(seq, tokens)
        assert manager.num_free == 9 - blocks
    assert manager.usage == pytest.approx(3 / 9)
    manager.free(seq)
    assert manager.num_free == 9


def test_the_null_block_is_never_handed_out():
    manager = manager_of(FULL, num_blocks=6)
    seq = manager.new_sequence(range(20))
    assert manager.allocate(seq, 20)
    assert sorted(manager.block_tables([seq])[0, 0].tolist()) == [1, 2, 3, 4, 5]
    assert not manager.can_allocate(seq, 21)


def test_a_failed_allocation_changes_nothing():
    manager = manager_of(FULL, window(8), num_blocks=8)
    first, second = manager.new_sequence(range(12)), manager.new_sequence(range(12))
    assert manager.allocate(first, 8)
    before = manager.block_tables([first, second]).copy()
    assert not manager.allocate(second, 8)  # 4 blocks needed, 3 free
    assert manager.num_free == 3
    assert np.array_equal(manager.block_tables([first, second]), before)
    manager.check_integrity([first, second])
    assert manager.allocate(second, 4)


def test_a_failed_allocation_queues_no_copy():
    manager = manager_of(FULL, num_blocks=3)
    seq = compute(manager, manager.new_sequence(range(6)), list(range(6)))
    twin = manager.fork(seq)
    assert not manager.allocate(twin, 7)  # needs a copy of the second block, none is free
    assert len(manager.take_copies()) == 0
    manager.free(twin)
    assert manager.allocate(seq, 7)


def test_block_tables_have_a_row_per_group_and_sequence_padded_with_the_null_block():
    manager = manager_of(FULL, window(100))
    short, long = manager.new_sequence([1]), manager.new_sequence(range(10))
    manager.allocate(short, 1)
    manager.allocate(long, 10)
    tables = manager.block_tables([short, long])
    assert tables.shape == (2, 2, 3)
    assert tables.dtype == np.int32
    assert tables.flags.c_contiguous
    assert (tables[:, 0, 1:] == 0).all()
    assert len(set(tables[tables > 0].tolist())) == 8
    assert manager.block_tables([]).shape == (2, 0, 0)


def test_block_tables_do_not_change_afterwards():
    manager = manager_of(window(4))
    seq = manager.new_sequence(range(20))
    manager.allocate(seq, 4)
    tables = manager.block_tables([seq])
    manager.commit(seq, range(20), 4)
    manager.allocate(seq, 8)
    manager.commit(seq, range(20), 8)
    assert tables.tolist() == [[[1]]]


class TestWindows:
    def test_a_block_dies_once_no_future_query_sees_it(self):
        """Window 5, blocks of 4: the query at n sees n - 4 .. n, so block 0 (0 .. 3) dies at n = 8, block 1 at 12."""
        manager, tokens = manager_of(window(5)), list(range(16))
        seq = manager.new_sequence(tokens)
        dead = []
        for n in range(1, 17):
            compute(manager, seq, tokens[:n])
            dead.append(int((manager.block_tables([seq])[0, 0] == 0).sum()))
        assert dead == [0] * 7 + [1] * 4 + [2] * 4 + [3]
        assert manager.stats.recycled_blocks == 3

    def test_positions_keep_their_place(self):
        manager, tokens = manager_of(window(5), FULL), list(range(12))
        seq = compute(manager, manager.new_sequence(tokens), tokens, chunk=4)
        tables = manager.block_tables([seq])
        assert tables.shape[2] == 3
        assert (tables[0, 0] > 0).tolist() == [False, False, True]
        assert (tables[1, 0] > 0).all()

    def test_a_chunk_longer_than_the_window_is_held_until_it_is_written(self):
        manager, tokens = manager_of(window(2), chunk_tokens=64), list(range(40))
        seq = manager.new_sequence(tokens)
        assert manager.allocate(seq, 40)
        assert (manager.block_tables([seq]) > 0).all()
        manager.commit(seq, tokens, 40)
        assert int((manager.block_tables([seq]) > 0).sum()) == 1  # key 39, for the query at 40

    @pytest.mark.parametrize("window_tokens", [1, 3, 8, 21])
    @pytest.mark.parametrize("chunk", [1, 3, 8, 13])
    def test_a_long_sequence_fits_in_the_blocks_that_sizing_gives_it(self, window_tokens, chunk):
        layout = make_layout([window(window_tokens)], block_tokens=4)
        blocks = layout.blocks_per_sequence(300, chunk)
        manager = BlockManager(layout, blocks + 1, prefix_caching=False, chunk_tokens=chunk)
        assert manager.fits(300)
        compute(manager, manager.new_sequence(range(300)), range(300), chunk)

    def test_a_chunk_beyond_the_sized_one_is_refused(self):
        manager = manager_of(window(8), chunk_tokens=16)
        with pytest.raises(EngineError, match="16 tokens"):
            manager.allocate(manager.new_sequence(range(17)), 17)

    def test_prefill_chunks_and_single_tokens_see_the_same_keys(self):
        """One prefill, chunks of 3, token by token: the same columns of the table are alive afterwards."""
        tokens, alive = list(range(30)), []
        for chunk in (30, 3, 1):
            manager = manager_of(window(7), FULL, chunk_tokens=30)
            seq = compute(manager, manager.new_sequence(tokens), tokens, chunk)
            alive.append((manager.block_tables([seq]) > 0).tolist())
        assert alive[0] == alive[1] == alive[2]


class TestOrderOfCalls:
    def test_a_freed_sequence_is_dead(self):
        manager = manager_of(FULL)
        seq = manager.new_sequence([1, 2])
        manager.free(seq)
        for call in (
            lambda: manager.free(seq),
            lambda: manager.fork(seq),
            lambda: manager.allocate(seq, 2),
            lambda: manager.commit(seq, [1, 2], 0),
        ):
            with pytest.raises(EngineError, match="freed"):
                call()

    def test_commit_is_within_what_is_allocated_and_known_and_never_goes_back(self):
        manager = manager_of(FULL)
        seq = manager.new_sequence(range(10))
        manager.allocate(seq, 5)
        for known, computed in [(10, 9), (4, 5)]:
            with pytest.raises(EngineError, match="commit"):
                manager.commit(seq, range(known), computed)
        manager.commit(seq, range(10), 5)
        with pytest.raises(EngineError, match="commit"):
            manager.commit(seq, range(10), 4)

    def test_commit_before_the_copies_were_made_is_refused(self):
        manager = manager_of(FULL)
        seq = compute(manager, manager.new_sequence(range(6)), range(6))
        twin = manager.fork(seq)
        manager.allocate(twin, 7)
        with pytest.raises(EngineError, match="copies"):
            manager.commit(twin, range(7), 7)

    def test_a_pool_without_a_usable_block_is_refused(self):
        with pytest.raises(EngineError, match="null block"):
            manager_of(FULL, num_blocks=1)


class TestCapacity:
    def test_fits_and_max_sequences_reckon_with_every_group(self):
        """40 tokens: 10 full blocks and ceil((7 + 8) / 4) + 1 = 5 windowed ones; 31 usable blocks hold two of 15."""
        manager = manager_of(FULL, window(8), num_blocks=32, chunk_tokens=8)
        assert manager.max_sequences(40) == 2
        assert manager.fits(40)
        assert not manager.fits(128)

    def test_after_every_way_to_end_all_blocks_are_free_again(self):
        """Freed before the first token, in the middle of a prompt, after it, as four forks: the counter returns."""
        manager = manager_of(FULL, window(6))
        tokens = list(range(30))
        for computed in (0, 7, 30):
            manager.free(compute(manager, manager.new_sequence(tokens), tokens[:computed], chunk=7))
            assert manager.num_free == 99
        seq = compute(manager, manager.new_sequence(tokens), tokens)
        family = [seq, *(manager.fork(seq) for _ in range(3))]
        for member in family:
            assert manager.allocate(member, 31)
            manager.free(member)
        manager.take_copies()
        assert manager.num_free == 99
        manager.check_integrity([])


@pytest.mark.parametrize("step_of_preemption", range(1, 90, 4))
def test_three_requests_in_six_blocks_read_their_own_keys_through_every_preemption(step_of_preemption):
    """Blocks of 16, three requests of 40 tokens: 9 blocks wanted, 6 there. The newest is preempted and recomputed."""
    pool = SimulatedPool(BlockManager(make_layout([FULL], block_tokens=16), 7))
    waiting = [[r] * 8 for r in range(3)]
    finished, step = [], 0
    while waiting or pool.live:
        step += 1
        if step == step_of_preemption and pool.live:
            waiting.insert(0, pool.live[-1].tokens)
            pool.free(pool.live[-1])
        elif waiting and pool.manager.num_free:
            pool.start(waiting.pop(0))
        plan = []
        for sequence in list(pool.live):
            while sequence in pool.live and not pool.manager.allocate(sequence.blocks, len(sequence.tokens)):
                victim = pool.live[-1]
                plan = [item for item in plan if item[0] is not victim]
                waiting.insert(0, victim.tokens)
                pool.free(victim)
            if sequence in pool.live:
                plan.append((sequence, len(sequence.tokens)))
        pool.execute(plan)
        pool.check_all()
        for sequence, _ in plan:
            if len(sequence.tokens) == 40:
                finished.append(sequence.tokens)
                pool.free(sequence)
            else:
                sequence.tokens.append(sequence.tokens[0] + len(sequence.tokens))
    assert sorted(finished) == [[r] * 8 + [r + n for n in range(8, 40)] for r in range(3)]
    assert pool.manager.num_free == 6


class TestIntegrity:
    """check_integrity() finds planted faults and names them."""

    def setup_method(self):
        self.manager = manager_of(FULL, window(5))
        tokens = list(range(10))
        self.seq = compute(self.manager, self.manager.new_sequence(tokens), tokens)
        self.other = self.manager.new_sequence(tokens)
        self.manager.free(compute(self.manager, self.manager.new_sequence([3] * 9), [3] * 9))
        self.manager.check_integrity([self.seq, self.other])

    def find(self, match, *live):
        with pytest.raises(EngineError, match=match):
            self.manager.check_integrity(live or [self.seq, self.other])

    def test_a_wrong_count(self):
        self.manager.pool.ref_count[int(self.seq.table[0, 0])] += 1
        self.find("references")

    def test_a_sequence_that_was_forgotten(self):
        self.find("references", self.seq)

    def test_a_lost_block(self):
        self.manager.pool.free.pop()
        self.find("in 0 of free")

    def test_a_block_in_two_lists(self):
        self.manager.pool.free.append(next(iter(self.manager.pool.cached)))
        self.find("in 2 of free")

    def test_a_block_in_two_places_of_a_table(self):
        self.seq.table[0, 1] = self.seq.table[0, 0]
        self.find("two places")

    def test_a_null_block_that_is_used(self):
        self.manager.pool.free.append(0)
        self.find("null block")

    def test_a_visible_block_that_is_missing(self):
        self.seq.table[0, 0] = 0
        self.find("missing")

    def test_a_dead_block_that_is_kept(self):
        self.seq.first_block[1] -= 1
        self.find("first visible")

    def test_a_cached_block_that_is_not_listed(self):
        self.manager.pool.entries[next(iter(self.manager.pool.cached))] = None
        self.find("cached but not listed")

    def test_a_cache_entry_that_points_elsewhere(self):
        block = next(iter(self.manager.pool.cached))
        _, node, slot = self.manager.pool.entries[block]
        node.blocks[slot] = int(self.seq.table[0, 2])
        self.find("disagree")


def test_importing_the_block_manager_does_not_import_torch():
    code = "import sys; sys.modules['torch'] = None; import plait.memory.blocks, plait.memory.layout"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
