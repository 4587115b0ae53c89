"""Steps over paged memory without a block manager: every sequence owns a fixed run of blocks in every group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from plait.memory.layout import CacheLayout
from plait.ops.step import Sequences, StepInputs


@dataclass
class Script:
    """Makes steps. tokens: the longest that a sequence may become. ids: per sequence, what it has been fed."""

    layout: CacheLayout
    vocab_size: int
    count: int = 4
    tokens: int = 384
    seed: int = 7
    computed: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.computed = [0] * self.count
        self.ids = [self.random.integers(0, self.vocab_size, self.tokens).tolist() for _ in range(self.count)]
        self.per_group = max(-(-self.tokens // group.block_tokens) for group in self.layout.groups)
        blocks = 1 + self.random.permutation(self.count * len(self.layout.groups) * self.per_group)
        self.table = blocks.astype(np.int32).reshape(len(self.layout.groups), self.count, self.per_group)

    @property
    def num_blocks(self) -> int:
        return self.table.size + 1

    def step(self, parts: Sequence[tuple[int, int]], rows: Sequence[int] | None = None):
        """parts: (sequence, new tokens). rows: whose logits are wanted, default all. -> (ids int32 [N], StepInputs)."""
        counts = [new for _, new in parts]
        start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        ids = [i for s, new in parts for i in self.ids[s][self.computed[s] : self.computed[s] + new]]
        for s, new in parts:
            self.computed[s] += new
        context = np.array([self.computed[s] for s, _ in parts], np.int32)
        table = np.ascontiguousarray(self.table[:, [s for s, _ in parts]])
        wanted = np.arange(start[-1], dtype=np.int32) if rows is None else np.array(rows, np.int32)
        reach = np.full(len(ids), self.tokens, np.int32)
        step = StepInputs(sequences=Sequences(start, context, table), reach=reach, logit_rows=wanted)
        return np.array(ids, np.int32), step


# Prefills of 1, 7 and 300 tokens, a mixed step (two decodes, a continued prefill, a new prompt), a decode step.
MIXED = (
    ((0, 1),),
    ((1, 7),),
    ((2, 300),),
    ((0, 1), (1, 1), (2, 20), (3, 33)),
    ((3, 1), (2, 1), (1, 1), (0, 1)),
)
