"""Whatever is chunked, preempted, forked, found in the prefix cache, recycled or copied, the logits are the plain ones.

The real block manager and the real pool; every row of logits that any step produced is compared with a plain forward of
its sequence, and with a dense one. The pool starts full of NaN, so that a row read beyond a sequence's end shows.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from plait.memory.blocks import SequenceBlocks
from plait.model.decoder import Decoder
from tests.memory.tiny_decoders import CONFIGS, tiny_decoder
from tests.parity.forwards import PagedRun, dense, plain, small_layout

SCHEDULES = 200
CHUNK = 9


@dataclass(eq=False)
class Live:
    """A sequence, and the logits rows that steps have given so far: (position, row)."""

    tokens: list[int]
    blocks: SequenceBlocks
    rows: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class Schedule:
    def __init__(self, decoder: Decoder, seed: int) -> None:
        self.rng = random.Random(seed)
        layout = small_layout(decoder, CHUNK)
        num_blocks = 1 + layout.blocks_per_sequence(40, CHUNK) + self.rng.randrange(12)
        self.run = PagedRun(decoder, num_blocks, CHUNK, layout=layout)
        nan = np.full(layout.block_bytes // 4, np.nan, np.float32).tobytes()
        for block in range(1, num_blocks):
            self.run.memory.write_block(block, nan)
        self.vocabulary = decoder.config.vocab_size
        self.prompts = [self.some_tokens(self.rng.randrange(9, 26)) for _ in range(2)]
        self.live: list[Live] = []
        self.waiting: list[Live] = []
        self.done: list[Live] = []
        self.events: Counter[str] = Counter()

    def some_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]

    def start(self, tokens: list[int], rows: list[tuple[int, torch.Tensor]]) -> None:
        blocks = self.run.blocks.new_sequence(tokens)
        self.events["prefix hit"] += blocks.num_cached_tokens > 0
        self.live.append(Live(tokens, blocks, rows))

    def fork(self) -> None:
        parent = self.rng.choice(self.live)
        self.live.append(Live(list(parent.tokens), self.run.blocks.fork(parent.blocks), list(parent.rows)))
        self.events["fork"] += 1

    def end(self, live: Live) -> None:
        self.run.blocks.free(live.blocks)
        self.live.remove(live)
        self.done.append(live)

    def plan(self) -> list[tuple[Live, int]]:
        """Sequences of the next step, each with its total afterwards; whoever finds no block preempts another one."""
        chosen: list[tuple[Live, int]] = []
        for live in self.rng.sample(self.live, self.rng.randrange(1, len(self.live) + 1)):
            if live not in self.live:
                continue
            computed = live.blocks.num_computed
            if computed == len(live.tokens):
                live.tokens.append(self.rng.randrange(self.vocabulary))
            total = min(len(live.tokens), computed + self.rng.choice((CHUNK, 1, 3, 6)))
            self.events["chunk"] += total < len(live.tokens)
            while not self.run.blocks.allocate(live.blocks, total):
                victim = self.rng.choice([other for other in self.live if other is not live])
                chosen = [(other, t) for other, t in chosen if other is not victim]
                self.run.blocks.free(victim.blocks)
                self.live.remove(victim)
                self.waiting.append(victim)
                self.events["preemption"] += 1
            chosen.append((live, total))
        return chosen

    def step(self) -> None:
        while self.waiting:
            again = self.waiting.pop()
            self.start(again.tokens, again.rows)
        if not self.live or (len(self.live) < 4 and self.rng.random() < 0.7):
            prompt = self.rng.choice(self.prompts)[: self.rng.randrange(5, 26)]
            self.start(prompt + self.some_tokens(self.rng.randrange(1, 5)), [])
        if len(self.live) < 5 and self.rng.random() < 0.3:
            self.fork()
        chosen = self.plan()
        starts = [live.blocks.num_computed for live, _ in chosen]
        logits = self.run.step([(live.blocks, live.tokens, total) for live, total in chosen])
        for (live, _), start, rows in zip(chosen, starts, logits, strict=True):
            live.rows += [(start + i, row) for i, row in enumerate(rows)]
        self.run.blocks.check_integrity([live.blocks for live in self.live])
        for live in list(self.live):
            if len(live.tokens) > 34 or self.rng.random() < 0.08:
                self.end(live)

    def compare(self) -> float:
        """The largest deviation of any row as a share of the tolerance, from the plain and from the dense forward."""
        everyone = self.done + self.live + self.waiting
        width = max(len(live.tokens) for live in everyone)
        ids = torch.tensor([live.tokens + [0] * (width - len(live.tokens)) for live in everyone])
        worst = 0.0
        for reference in (plain(self.run.decoder, ids), dense(self.run.decoder, ids, (11, 2))):
            tolerance = 1e-4 * max(1.0, reference.abs().max().item() / 10)
            for expected, live in zip(reference, everyone, strict=True):
                if live.rows:
                    rows = torch.stack([row for _, row in live.rows]).log_softmax(-1)
                    right = expected[[position for position, _ in live.rows]].log_softmax(-1)
                    error = (rows - right).abs().max().item()
                    worst = max(worst, error / tolerance) if error == error else float("inf")
        return worst


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", CONFIGS)
def test_any_schedule_gives_the_logits_of_the_plain_and_the_dense_forward(family: str):
    decoder = tiny_decoder(family)
    events: Counter[str] = Counter()
    worst = 0.0
    for seed in range(SCHEDULES):
        schedule = Schedule(decoder, seed)
        for _ in range(schedule.rng.randrange(6, 14)):
            schedule.step()
        share = schedule.compare()
        assert share <= 1, f"schedule {seed}: {share:.2f} times the tolerance"
        worst = max(worst, share)
        stats = schedule.run.blocks.stats
        events += schedule.events
        events.update(copy=stats.cow_copies, recycled=stats.recycled_blocks, eviction=stats.evictions)
    expected = {"chunk", "preemption", "fork", "prefix hit", "copy", "eviction"}
    if any(cache.window for cache in decoder.config.caches()):
        expected.add("recycled")
    print(f"\n{decoder.config.model_type}: {SCHEDULES} schedules, {worst:.3f} of the tolerance, {dict(events)}")
    assert all(events[name] > 0 for name in expected), events
