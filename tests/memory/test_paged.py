"""The pool: hand-made block tables, the null block, stale rows, copies, blocks as bytes, pages that cost nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.errors import UsageError
from plait.memory.layout import make_layout
from plait.memory.paged import PagedMemory
from plait.ops.spec import LayerCache
from plait.ops.step import Sequences, StepInputs
from tests.memory.tiny_decoders import CONFIGS, tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")


class Pool:
    """A decoder over a paged memory with tables written by hand: sequence s of group g has blocks of its own."""

    def __init__(
        self, family: str, num_sequences: int = 2, blocks: int = 10, seed: int = 0, dtype=torch.float32
    ) -> None:
        self.decoder = tiny_decoder(family).to(dtype)
        self.layout = make_layout(self.decoder.config.caches(), dtype.itemsize, 40, 40, block_tokens=4)
        groups = len(self.layout.groups)
        order = np.random.default_rng(seed).permutation(groups * num_sequences * blocks) + 1
        self.table = order.reshape(groups, num_sequences, blocks).astype(np.int32)
        self.memory = PagedMemory(self.layout, order.size + 1, dtype)

    def poison(self) -> None:
        """Every block but the null block full of NaN."""
        nan = np.full(self.layout.block_bytes // 4, np.nan, np.float32).tobytes()
        for block in range(1, self.memory.num_blocks):
            self.memory.write_block(block, nan)

    def step(self, chunks, context, which=(0, 1), copies=None, table=None) -> list[torch.Tensor]:
        """chunks: ids per sequence of `which`; context: tokens each has afterwards. Returns logits per sequence."""
        lengths = [len(c) for c in chunks]
        bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        tables = (self.table if table is None else table)[:, list(which)]
        more = {} if copies is None else {"copies": np.array(copies, np.int32)}
        sequences = Sequences(bounds, np.array(context, np.int32), tables, **more)
        ids = torch.tensor([i for chunk in chunks for i in chunk])
        with torch.inference_mode():
            hidden = self.decoder(ids, StepInputs(sequences=sequences), self.memory)
            return list(self.decoder.logits(hidden).split(lengths))

    def plain(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.decoder.logits(self.decoder(torch.tensor(ids)))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.log_softmax(-1) - b.log_softmax(-1)).abs().max().item() <= 1e-4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 29, count).tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_prefill_and_decode_in_one_step_over_scattered_blocks(family):
    pool = Pool(family)
    pool.poison()
    a, b = tokens(23, 1), tokens(17, 2)
    found_a = [pool.step([a[:9]], [9], (0,))[0]]
    steps = [(a[9:10], b[:6]), (a[10:18], b[6:7]), (a[18:19], b[7:8]), (a[19:23], b[8:17])]
    found_b, done_a, done_b = [], 9, 0
    for chunk_a, chunk_b in steps:
        done_a, done_b = done_a + len(chunk_a), done_b + len(chunk_b)
        x, y = pool.step([chunk_a, chunk_b], [done_a, done_b])
        found_a.append(x)
        found_b.append(y)
    assert close(torch.cat(found_a), pool.plain(a))
    assert close(torch.cat(found_b), pool.plain(b))


def test_the_null_block_is_never_written_and_may_stand_for_blocks_out_of_the_window():
    pool = Pool("mistral", num_sequences=1)  # window 5, blocks of 4
    ids = tokens(30, 3)
    found = [pool.step([ids[:6]], [6], (0,))[0]]
    for position in range(6, 30):
        table = pool.table.copy()
        table[:, :, : max(position - 4, 0) // 4] = 0
        found += pool.step([ids[position : position + 1]], [position + 1], (0,), table=table)
    assert close(torch.cat(found), pool.plain(ids))
    assert not any(pool.memory.read_block(0))


def test_rows_beyond_the_end_of_a_sequence_are_skipped_and_not_multiplied_by_zero():
    pool = Pool("llama")
    a, b = tokens(9, 4), tokens(2, 5)
    pool.step([a[:8], b[:1]], [8, 1])
    for g in range(pool.table.shape[0]):
        for s, length in ((0, 8), (1, 1)):  # rows of their own blocks that hold no token yet
            for column in range(length // 4, pool.table.shape[2]):
                spoil_rows(pool, int(pool.table[g, s, column]), from_row=length - 4 * column)
    x, y = pool.step([a[8:], b[1:]], [9, 2])
    assert close(x, pool.plain(a)[8:])
    assert close(y, pool.plain(b)[1:])


def spoil_rows(pool: Pool, block: int, from_row: int) -> None:
    """NaN into the rows of a block from `from_row` on: keys, then values, per layer slot."""
    numbers = np.frombuffer(pool.memory.read_block(block), np.float32).copy()
    slots = numbers.reshape(pool.layout.group_layers, 2, 4, -1)
    slots[:, :, max(from_row, 0) :] = np.nan
    pool.memory.write_block(block, slots.tobytes())


def test_copies_are_made_before_the_step_writes():
    """The second sequence begins with a copy of the first one's blocks and then goes its own way."""
    pool = Pool("gemma3_text")
    a = tokens(6, 6)
    b = a[:5] + [(a[5] + 1) % 29]
    pool.step([a[:5]], [5], (0,))
    copies = [(pool.table[g, 0, c], pool.table[g, 1, c]) for g in range(pool.table.shape[0]) for c in range(2)]
    x, y = pool.step([a[5:], b[5:]], [6, 6], copies=copies)
    assert close(x, pool.plain(a)[5:])
    assert close(y, pool.plain(b)[5:])


def test_a_block_comes_back_from_its_bytes_identical():
    pool = Pool("qwen2", num_sequences=1)
    ids = tokens(12, 7)
    pool.step([ids[:11]], [11], (0,))
    used = {int(b) for b in pool.table[:, 0, :3].ravel()}
    saved = {block: pool.memory.read_block(block) for block in used}
    assert {len(data) for data in saved.values()} == {pool.layout.block_bytes}
    pool.poison()
    for block, data in saved.items():
        pool.memory.write_block(block, data)
    assert all(pool.memory.read_block(block) == data for block, data in saved.items())
    assert close(pool.step([ids[11:]], [12], (0,))[0], pool.plain(ids)[11:])


def test_untouched_pages_of_the_pool_cost_nothing():
    layout = make_layout(tiny_decoder("llama").config.caches(), block_tokens=16)
    num_blocks = (1 << 30) // layout.block_bytes
    memory = PagedMemory(layout, num_blocks)
    touched = memory.touched_bytes()
    if touched is None:
        pytest.skip("this platform does not say what is resident")
    assert memory.pool_bytes > 0.99 * (1 << 30)
    assert touched < 1 << 20
    memory.write_block(5, bytes(layout.block_bytes))
    assert 0 < memory.touched_bytes() < 1 << 20


def test_a_pool_in_bf16_under_a_model_in_bf16():
    pool = Pool("qwen3", dtype=torch.bfloat16)
    ids = tokens(14, 8)
    found = torch.cat([pool.step([ids[:7]], [7], (0,))[0], pool.step([ids[7:]], [14], (0,))[0]])
    difference = (found.log_softmax(-1) - pool.plain(ids).log_softmax(-1)).abs()
    assert difference.mean() < 0.05


@pytest.mark.parametrize("wrong", ["no inputs", "no table", "batch", "dtype"])
def test_what_the_pool_cannot_serve_is_refused(wrong):
    pool = Pool("llama")
    ids = torch.zeros(2, 3, dtype=torch.long) if wrong == "batch" else torch.zeros(3, dtype=torch.long)
    sequences = Sequences(np.array([0, 3], np.int32), np.array([3], np.int32))
    with pytest.raises(UsageError):
        if wrong == "dtype":
            PagedMemory(pool.layout, 4, torch.bfloat16)
        pool.decoder(ids, None if wrong == "no inputs" else StepInputs(sequences=sequences), pool.memory)


@pytest.mark.parametrize("name", ["token_mask", "segment_ids", "adapter_ids"])
def test_inputs_that_paged_memory_would_ignore_are_refused(name: str):
    memory = PagedMemory(make_layout([LayerCache(1, 4, 4)]), 4)
    sequences = Sequences(np.array([0, 2], np.int32), np.array([2], np.int32), np.ones((1, 1, 1), np.int32))
    with pytest.raises(UsageError, match=name):
        memory.begin(torch.tensor([1, 2]), StepInputs(sequences=sequences, **{name: torch.zeros(2)}))


def test_a_narrower_cache_gives_the_same_numbers_for_every_chunking():
    decoder = tiny_decoder("llama")
    ids = torch.arange(24) % decoder.config.vocab_size

    def run(chunks: list[int]) -> torch.Tensor:
        layout = make_layout(decoder.config.caches(), bytes_per_number=2, context_tokens=64)
        memory = PagedMemory(layout, 8, torch.bfloat16)
        table = np.array([[[1, 2, 3, 4]]], np.int32)
        done, hidden = 0, []
        for count in chunks:
            bounds = np.array([0, count], np.int32), np.array([done + count], np.int32)
            step = StepInputs(sequences=Sequences(*bounds, table))
            hidden.append(decoder(ids[done : done + count], step, memory))
            done += count
        return torch.cat(hidden)

    with torch.inference_mode():
        torch.testing.assert_close(run([24]), run([10, 14]), atol=1e-5, rtol=0)
