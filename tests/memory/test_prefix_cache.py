"""Prefixes that later sequences find: what is kept, shared, evicted and forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from plait.memory import prefix_cache
from plait.memory.blocks import BlockManager
from plait.memory.layout import CacheGroup, CacheLayout
from plait.ops.spec import LayerCache
from tests.memory.managers import FULL, cached_tokens, compute, manager_of, window


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


def test_hit_granularity_is_the_least_common_multiple_of_the_blocks():
    groups = (CacheGroup((0,), LayerCache(1, 6, 6), 4), CacheGroup((1,), LayerCache(1, 4, 4), 6))
    manager = BlockManager(CacheLayout(groups, 1, 192, 4), 60)
    tokens = list(range(40))
    manager.free(compute(manager, manager.new_sequence(tokens), tokens))
    assert cached_tokens(manager, tokens) == 36
    assert cached_tokens(manager, tokens[:36]) == 24


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
