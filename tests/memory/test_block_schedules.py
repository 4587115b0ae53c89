"""Random schedules of everything the block manager does; every visible slot is compared at every step."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from plait.memory import prefix_cache
from plait.memory.blocks import BlockManager
from plait.memory.layout import group_blocks, make_layout
from plait.ops.spec import LayerCache
from tests.memory.simulated_pool import SimulatedPool

pytestmark = pytest.mark.slow

CHUNK = 9
FULL, WIDE = LayerCache(1, 4, 4), LayerCache(1, 8, 8)
LAYOUTS = {
    "full": [FULL, FULL],
    "window and full": [LayerCache(1, 4, 4, 5), FULL],
    "two windows": [LayerCache(1, 4, 4, 3), LayerCache(1, 4, 4, 10)],
    "one window": [LayerCache(1, 4, 4, 7)],
    "window of one": [LayerCache(1, 4, 4, 1), FULL],
    "unequal blocks": [LayerCache(1, 4, 4, 6), WIDE, LayerCache(1, 4, 4)],
}


def run_schedule(layers, seed, steps=30) -> Counter:
    """One schedule; returns how often each kind of event happened."""
    rng = random.Random(seed)
    manager = BlockManager(make_layout(layers, block_tokens=4), rng.choice([16, 32, 64]), chunk_tokens=CHUNK)
    pool, events, version = SimulatedPool(manager), Counter(), 0
    shared = [[rng.randrange(3) for _ in range(rng.randrange(1, 50))] for _ in range(3)]
    for _ in range(steps):
        if rng.random() < 0.6 and len(pool.live) < 5:
            prompt = rng.choice(shared) + [rng.randrange(3) for _ in range(rng.randrange(6))]
            prompt = prompt[: rng.choice([len(prompt), rng.randrange(1, len(prompt) + 1)])]
            salt = rng.choice([(), (), ("salt", "other")])
            started = pool.start(prompt, salt, version, use_cache=rng.random() < 0.9)
            events["hit"] += started.blocks.num_cached_tokens > 0
        if pool.live and rng.random() < 0.15 and len(pool.live) < 7:
            pool.fork(rng.choice(pool.live))
            events["fork"] += 1
        plan = []
        chosen = rng.sample(pool.live, rng.randrange(len(pool.live) + 1))
        for sequence in chosen:  # forks that are made on the way join it
            if sequence not in pool.live:
                continue
            done = sequence.blocks.num_computed
            if done == len(sequence.tokens):
                sequence.tokens.append(rng.randrange(3))
            total = min(len(sequence.tokens), done + rng.choice([CHUNK, rng.randrange(1, CHUNK + 1)]))
            events["chunk"] += total < len(sequence.tokens)
            while sequence in pool.live and not allocate(manager, sequence, total):
                victim = rng.choice(pool.live)  # maybe one that is in the plan, with copies queued
                plan = [item for item in plan if item[0] is not victim]
                pool.free(victim)
                events["preemption"] += 1
            if sequence in pool.live:
                plan.append((sequence, total))
            if plan and rng.random() < 0.1 and len(pool.live) < 7:
                chosen.append(pool.fork(rng.choice(plan)[0]))  # while a write into its last block is under way
                events["fork in a step"] += 1
            if rng.random() < 0.2:
                manager.check_integrity([s.blocks for s in pool.live])
        check_bounds(manager, pool, plan)
        pool.execute(plan)
        if pool.live and rng.random() < 0.3:
            pool.free(rng.choice(pool.live))
        if rng.random() < 0.02:
            manager.reset_prefix_cache()
            events["reset"] += 1
        if rng.random() < 0.02:
            for sequence in list(pool.live):
                pool.free(sequence)
            version += 1
            manager.set_weights_version(version)
            events["new weights"] += 1
        pool.check_all()
    for sequence in list(pool.live):
        pool.free(sequence)
    manager.take_copies()
    assert manager.num_free == manager.num_blocks - 1
    stats = manager.stats
    events.update(cow=stats.cow_copies, recycled=stats.recycled_blocks, eviction=stats.evictions)
    return events


def allocate(manager, sequence, total) -> bool:
    """allocate() that is seen to keep can_allocate()'s promise, and to change nothing when it fails."""
    blocks = sequence.blocks
    possible, free, table = manager.can_allocate(blocks, total), manager.num_free, blocks.table.copy()
    assert manager.allocate(blocks, total) == possible
    if not possible:
        assert manager.num_free == free
        assert (blocks.table == table).all()
    return possible


def check_bounds(manager, pool, plan):
    """No sequence holds more blocks in a group than sizing and admission reckon with."""
    for sequence, total in plan:
        for g, group in enumerate(pool.groups):
            held = int((sequence.blocks.table[g] != 0).sum())
            assert held <= group_blocks(group, total, CHUNK)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_visible_slot_reads_what_was_written_whatever_the_schedule(name):
    events = Counter()
    for seed in range(60):
        events += run_schedule(LAYOUTS[name], seed)
    expected = {"hit", "fork", "fork in a step", "chunk", "preemption", "cow", "eviction", "reset", "new weights"}
    if any(cache.window for cache in LAYOUTS[name]):
        expected.add("recycled")
    assert expected <= events.keys(), events


def test_schedules_stay_right_when_all_hashes_collide(monkeypatch):
    class OneHash(bytes):
        def __hash__(self):
            return 1

    real = prefix_cache.block_key
    monkeypatch.setattr(prefix_cache, "block_key", lambda tokens: OneHash(real(tokens)))
    events = Counter()
    for seed in range(20):
        events += run_schedule(LAYOUTS["window and full"], seed)
    assert events["hit"] > 0
