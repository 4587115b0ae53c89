from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from plait.errors import EngineError
from plait.memory import prefix_cache
from plait.memory.blocks import BlockManager
from plait.memory.layout import CacheGroup, CacheLayout, make_layout
from plait.ops.spec import LayerCache
from tests.memory.simulated_pool import SimulatedPool

FULL = LayerCache(1, 4, 4)


def window(tokens):
    return LayerCache(1, 4, 4, tokens)


def manager_of(*layers, num_blocks=100, block_tokens=4, **options) -> BlockManager:
    """One group per kind of layer given (one layer each, so groups have one layer)."""
    return BlockManager(make_layout(layers, block_tokens=block_tokens), num_blocks, **options)


def compute(manager, seq, tokens, chunk=1 << 30):
    """Run `tokens` through in chunks, as an engine would with this sequence alone."""
    while seq.num_computed < len(tokens):
        total = min(seq.num_computed + chunk, len(tokens))
        assert manager.allocate(seq, total)
        manager.take_copies()
        manager.commit(seq, tokens, total)
    return seq


def cached_tokens(manager, tokens, salt=()) -> int:
    """What a new request with these tokens would find."""
    seq = manager.new_sequence(tokens, salt)
    manager.free(seq)
    return seq.num_cached_tokens


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


class TestPrefixCache:
    def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(self):
        manager = manager_of(FULL)
        tokens = list(range(16))
        manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        for length, hit in [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (15, 12), (16, 12), (17, 16)]:
            assert cached_tokens(manager, list(range(length))) == hit
        assert cached_tokens(manager, []) == 0

    def test_a_running_sequence_shares_its_computed_blocks(self):
        manager = manager_of(FULL)
        tokens = list(range(10))
        first = compute(manager, manager.new_sequence(tokens), tokens)
        free = manager.num_free
        second = manager.new_sequence(tokens)
        assert second.num_cached_tokens == second.num_computed == 8
        assert manager.num_free == free
        assert manager.block_tables([first])[0, 0, :2].tolist() == manager.block_tables([second])[0, 0].tolist()
        manager.free(first)
        manager.check_integrity([second])

    def test_blocks_that_are_not_full_or_not_computed_are_not_found(self):
        manager = manager_of(FULL)
        tokens = list(range(12))
        seq = manager.new_sequence(tokens)
        manager.allocate(seq, 12)
        assert cached_tokens(manager, tokens) == 0
        manager.commit(seq, tokens, 7)
        assert cached_tokens(manager, tokens) == 4

    def test_generated_tokens_are_found_too(self):
        manager, tokens = manager_of(FULL), list(range(5))
        seq = compute(manager, manager.new_sequence(tokens), tokens)
        for token in range(5, 13):
            tokens.append(token)
            compute(manager, seq, tokens)
        manager.free(seq)
        assert cached_tokens(manager, [*range(13), 99]) == 12

    def test_the_whole_prefix_counts_not_the_block_alone(self):
        manager = manager_of(FULL)
        tokens = [1, 1, 1, 1, 2, 2, 2, 2]
        manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        assert cached_tokens(manager, [2, 2, 2, 2, 1]) == 0
        assert cached_tokens(manager, [3, 3, 3, 3, 2, 2, 2, 2, 1]) == 0

    def test_salt_adapter_and_rotary_set_isolate(self):
        manager, tokens = manager_of(FULL), list(range(9))
        manager.free(compute(manager, manager.new_sequence(tokens, (("salt", "a"),)), tokens))
        assert cached_tokens(manager, tokens, (("salt", "a"),)) == 8
        for other in [(), (("salt", "b"),), (("adapter", "a"),), (("salt", "a"), ("rope", "yarn"))]:
            assert cached_tokens(manager, tokens, other) == 0

    @pytest.mark.parametrize("caches", [(FULL,), (window(3),), (window(3), FULL)])
    def test_a_hash_that_always_collides_changes_no_result(self, monkeypatch, caches):
        class OneHash(bytes):
            def __hash__(self):
                return 1

        real = prefix_cache.block_key
        monkeypatch.setattr(prefix_cache, "block_key", lambda tokens: OneHash(real(tokens)))
        manager = manager_of(*caches)
        for tokens in ([1] * 4 + [2] * 4, [3] * 4 + [2] * 4, [1] * 8):
            manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        assert cached_tokens(manager, [1] * 4 + [2] * 4 + [0]) == 8
        assert cached_tokens(manager, [3] * 4 + [2] * 4 + [0]) == 8
        assert cached_tokens(manager, [2] * 4 + [2] * 4 + [0]) == 0
        assert cached_tokens(manager, [3] * 8 + [0]) == 4

    def test_a_windowed_group_needs_only_the_blocks_that_the_next_query_sees(self):
        """Window 5, hit at 16: keys 12 .. 15, block 3 alone. Blocks 0 .. 2 are gone from the pool's cache."""
        manager = manager_of(window(5), num_blocks=4, chunk_tokens=4)
        tokens = list(range(16))
        manager.free(compute(manager, manager.new_sequence(tokens), tokens, chunk=4))
        assert manager.stats.evictions == 1
        seq = manager.new_sequence([*tokens, 0])
        assert seq.num_cached_tokens == 16
        assert (manager.block_tables([seq])[0, 0] > 0).tolist() == [False, False, False, True]

    def test_the_hit_is_the_longest_that_suits_every_group(self):
        """The full group has all 4 blocks of the prefix, the windowed one lost its last: both go back to 12 tokens."""
        manager = manager_of(window(5), FULL)
        tokens = list(range(16))
        seq = manager.new_sequence(tokens)
        compute(manager, seq, tokens, chunk=4)
        last = int(manager.block_tables([seq])[0, 0, 3])
        manager.free(seq)
        manager.pool.cached.move_to_end(last, last=False)
        hog = manager.new_sequence([9], use_cache=False)
        assert manager.allocate(hog, 4)
        while last not in manager.block_tables([hog]):
            assert manager.allocate(hog, hog.capacity_tokens + 4)
        assert cached_tokens(manager, [*tokens, 0]) == 12

    def test_a_hit_is_a_multiple_of_every_groups_block(self):
        """The full kind has rows twice as wide: its blocks have 4 tokens, those of the narrow one 8."""
        manager = manager_of(LayerCache(1, 8, 8), LayerCache(1, 4, 4))
        assert [group.block_tokens for group in manager.layout.groups] == [4, 8]
        tokens = list(range(15))
        manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        assert cached_tokens(manager, tokens) == 8

    def test_the_least_recently_freed_goes_first_and_of_a_sequence_its_tail(self):
        left = []
        for needed in range(7):
            manager = manager_of(FULL, num_blocks=7)  # 6 blocks, all cached by two sequences of 3
            for tokens in ([1] * 12, [2] * 12):
                manager.free(compute(manager, manager.new_sequence(tokens), tokens))
            assert manager.allocate(manager.new_sequence([7]), 4 * needed)
            assert manager.stats.evictions == needed
            left.append((cached_tokens(manager, [1] * 13), cached_tokens(manager, [2] * 13)))
        assert left == [(12, 12), (8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]

    def test_free_blocks_are_used_before_cached_ones(self):
        manager = manager_of(FULL, num_blocks=7)
        manager.free(compute(manager, manager.new_sequence([1] * 8), [1] * 8))
        assert manager.allocate(manager.new_sequence([2]), 16)
        assert manager.stats.evictions == 0
        assert cached_tokens(manager, [1] * 9) == 8

    def test_a_held_block_is_never_evicted(self):
        manager = manager_of(FULL, num_blocks=5)
        tokens = [1] * 9
        manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        seq = manager.new_sequence(tokens)
        assert manager.num_free == 2
        other = manager.new_sequence([5])
        assert not manager.can_allocate(other, 12)
        assert manager.allocate(other, 8)
        assert (manager.block_tables([seq])[0, 0] > 0).sum() == 2
        manager.check_integrity([seq, other])

    def test_equal_content_computed_twice_is_cached_once(self):
        manager, tokens = manager_of(FULL), list(range(8))
        pair = [manager.new_sequence(tokens), manager.new_sequence(tokens)]
        for seq in pair:
            compute(manager, seq, tokens)
        for seq in pair:
            manager.free(seq)
        assert len(manager.pool.cached) == 2
        assert manager.num_free == 99
        manager.check_integrity([])

    def test_a_request_for_prompt_logprobs_skips_hits_but_leaves_blocks_for_others(self):
        manager, tokens = manager_of(FULL, block_tokens=16), list(range(33))
        for use_cache, hit in [(False, 0), (False, 0), (True, 32)]:
            seq = manager.new_sequence(tokens, use_cache=use_cache)
            assert seq.num_cached_tokens == hit
            manager.free(compute(manager, seq, tokens))
        assert manager.stats.prefix_queries_tokens == 33
        assert manager.stats.prefix_hit_tokens == 32

    def test_without_prefix_caching_nothing_is_found(self):
        manager, tokens = manager_of(FULL, prefix_caching=False), list(range(9))
        manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        assert cached_tokens(manager, tokens) == 0
        assert not manager.pool.cached

    def test_reset_forgets_and_live_sequences_no_longer_feed_the_cache(self):
        manager, tokens = manager_of(FULL, window(4)), list(range(13))
        seq = compute(manager, manager.new_sequence(tokens), tokens[:6])
        manager.reset_prefix_cache()
        manager.check_integrity([seq])
        compute(manager, seq, tokens)
        assert cached_tokens(manager, tokens) == 0
        manager.free(seq)
        manager.check_integrity([])
        assert manager.num_free == 99
        assert cached_tokens(manager, tokens) == 0

    def test_other_weights_find_nothing_of_the_old_ones_even_when_they_return(self):
        manager, tokens = manager_of(FULL), list(range(9))
        manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        manager.set_weights_version(0)
        assert cached_tokens(manager, tokens) == 8
        manager.set_weights_version(1)
        assert cached_tokens(manager, tokens) == 0
        manager.set_weights_version(0)
        assert cached_tokens(manager, tokens) == 0

    def test_the_books_of_forgotten_prefixes_are_thrown_away(self):
        """Each tenant has a salt of its own: what is evicted leaves no node behind."""
        manager = manager_of(FULL, num_blocks=4)
        for tenant in range(50):
            seq = manager.new_sequence([1] * 12, (("salt", tenant),))
            manager.free(compute(manager, seq, [1] * 12))
        assert len(manager.cache.trees[0].roots) == 1
        manager.check_integrity([])


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


def test_hit_granularity_is_the_least_common_multiple_of_the_blocks():
    groups = (CacheGroup((0,), LayerCache(1, 6, 6), 4), CacheGroup((1,), LayerCache(1, 4, 4), 6))
    manager = BlockManager(CacheLayout(groups, 1, 192, 4), 60)
    tokens = list(range(40))
    manager.free(compute(manager, manager.new_sequence(tokens), tokens))
    assert cached_tokens(manager, tokens) == 36
    assert cached_tokens(manager, tokens[:36]) == 24


def test_importing_the_block_manager_does_not_import_torch():
    code = "import sys; sys.modules['torch'] = None; import plait.memory.blocks, plait.memory.layout"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


class TestForgetting:
    """Bad content: free(seq, forget=True) takes a prefix out of the cache."""

    def test_the_prefix_is_not_found_again_and_others_are(self):
        manager, tokens, other = manager_of(FULL, window(6)), list(range(20)), list(range(50, 70))
        manager.free(compute(manager, manager.new_sequence(other), other))
        bad = compute(manager, manager.new_sequence(tokens), tokens, chunk=4)
        manager.free(bad, forget=True)
        manager.check_integrity([])
        assert cached_tokens(manager, tokens) == 0 and cached_tokens(manager, other) == 16
        compute_again = compute(manager, manager.new_sequence(tokens), tokens)
        manager.free(compute_again)
        assert cached_tokens(manager, tokens) == 16

    def test_what_continues_the_prefix_goes_too(self):
        manager, tokens = manager_of(FULL), list(range(24))
        manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        bad = compute(manager, manager.new_sequence(tokens[:9]), tokens[:9])
        assert bad.num_cached_tokens == 8
        manager.free(bad, forget=True)
        manager.check_integrity([])
        assert manager.num_free == 99 and len(manager.pool.cached) == 0
        manager.free(compute(manager, manager.new_sequence(tokens[:12]), tokens[:12]))
        assert cached_tokens(manager, tokens) == 12  # not the old block after it

    def test_live_sequences_keep_their_blocks_and_go_on(self):
        manager, tokens = manager_of(FULL, window(6)), list(range(20))
        bad = compute(manager, manager.new_sequence(tokens), tokens)
        twin, reader = manager.fork(bad), manager.new_sequence(tokens)
        before = manager.block_tables([twin, reader])
        manager.free(bad, forget=True)
        manager.check_integrity([twin, reader])
        assert np.array_equal(manager.block_tables([twin, reader]), before)
        longer = tokens + list(range(30, 42))
        compute(manager, twin, longer)
        manager.check_integrity([twin, reader])
        manager.free(twin)
        manager.free(reader)
        manager.check_integrity([])
        assert manager.num_free == 99

    def test_after_a_reset_nothing_is_left_to_forget(self):
        manager, tokens = manager_of(FULL), list(range(12))
        bad = compute(manager, manager.new_sequence(tokens), tokens)
        manager.reset_prefix_cache()
        manager.free(compute(manager, manager.new_sequence(tokens), tokens))
        manager.free(bad, forget=True)
        manager.check_integrity([])
        assert cached_tokens(manager, tokens) == 8

    def test_a_source_of_a_queued_copy_is_kept_until_the_copy_is_made(self):
        manager, tokens = manager_of(FULL, num_blocks=6), list(range(6))
        bad = compute(manager, manager.new_sequence(tokens), tokens)
        twin = manager.fork(bad)
        assert manager.allocate(twin, 7)
        manager.free(bad, forget=True)
        manager.check_integrity([twin])
        assert len(manager.take_copies()) == 1
        manager.free(twin)
        manager.check_integrity([])
