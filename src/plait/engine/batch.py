"""A schedule as flat arrays: what the executor gets, and which logits row belongs to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.engine.request import SequenceState
from plait.engine.scheduler import prompt_rows
from plait.memory.blocks import BlockManager
from plait.ops.step import Sequences, StepInputs


@dataclass(frozen=True)
class Batch:
    """token_ids int32 [N] and inputs of a step. S sequences; the logits have R rows.

    counts: tokens of each sequence. prompt_rows: (sequence, first logits row, prompt positions).
    sample_rows: (sequence, logits row) of those whose known tokens are all computed after this step. hidden_rows:
    (sequence, first flat token) of those whose hidden states are wanted.
    """

    token_ids: NDArray[np.int32]
    inputs: StepInputs
    counts: dict[SequenceState, int]
    prompt_rows: list[tuple[SequenceState, int, range]]
    sample_rows: list[tuple[SequenceState, int]]
    hidden_rows: list[tuple[SequenceState, int]]


def by_adapter(seqs: Iterable[SequenceState]) -> list[SequenceState]:
    """Those of one adapter next to one another, so that its matrices are read once; else in the order given."""
    return sorted(seqs, key=lambda seq: seq.owner.adapter)


def adapter_ids(seqs: Iterable[SequenceState]) -> NDArray[np.int32] | None:
    """StepInputs.adapter_ids, int32 [S]; None where no sequence has one."""
    numbers = [seq.owner.adapter for seq in seqs]
    return np.array(numbers, np.int32) if any(numbers) else None


def build_batch(counts: dict[SequenceState, int], manager: BlockManager) -> Batch:
    """Lay the scheduled tokens out one after another, those of one adapter together; takes the queued copies along."""
    counts = {seq: counts[seq] for seq in by_adapter(counts)}
    query_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(np.fromiter(counts.values(), np.int32, len(counts)), out=query_start[1:])
    context_len = np.fromiter((s.num_computed + n for s, n in counts.items()), np.int32, len(counts))
    ids = [s.tokens.array[s.num_computed : s.num_computed + n] for s, n in counts.items()]
    rows: list[int] = []
    wanted: list[tuple[SequenceState, int, range]] = []
    sampled: list[tuple[SequenceState, int]] = []
    hidden: list[tuple[SequenceState, int]] = []
    for (seq, count), start in zip(counts.items(), query_start.tolist(), strict=False):
        if seq.owner.prompt_logprobs is not None and (positions := prompt_rows(seq, count)):
            wanted.append((seq, len(rows), positions))
            rows.extend(start + p - seq.num_computed for p in positions)
        if seq.owner.pooled is not None:
            hidden.append((seq, start))
        elif count == seq.remaining and len(seq.tokens) < seq.owner.max_total_tokens:
            sampled.append((seq, len(rows)))
            rows.append(start + count - 1)
    sequences = Sequences(
        query_start=query_start,
        context_len=context_len,
        block_table=manager.block_tables([s.held for s in counts]),
        copies=manager.take_copies(),
    )
    totals = np.fromiter((s.owner.max_total_tokens for s in counts), np.int32, len(counts))
    inputs = StepInputs(
        sequences=sequences,
        reach=np.repeat(totals, np.diff(query_start)),
        logit_rows=np.asarray(rows, np.int32),
        adapter_ids=adapter_ids(counts),
    )
    return Batch(np.concatenate(ids, dtype=np.int32), inputs, counts, wanted, sampled, hidden)
