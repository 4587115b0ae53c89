"""Steps in which every running sequence decodes one token, which are nearly all: the arrays are kept and advanced.

What the scheduler and the batch would find out anew for every sequence in every step (no budget is short, nobody can
be admitted, each block table is as it was) is known here, until a sequence comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait.engine.batch import adapter_ids, by_adapter
from plait.engine.request import SequenceState
from plait.memory.blocks import BlockManager
from plait.ops.step import Sequences, StepInputs


class SteadyBatch:
    """The S sequences of a step that has been done, all of them decoding, in the scheduler's order, by adapter.

    version: the scheduler's when this was made; with any other one it is void. token_ids: int32 [S], the newest token
    of each. context_len: int32 [S], tokens in the cache once the present step is done. stop_ids: int32, ascending, the
    tokens that may end any of them.
    """

    def __init__(self, seqs: Sequence[SequenceState], manager: BlockManager, version: int) -> None:
        self.seqs = seqs = by_adapter(seqs)
        self.version = version
        self.blocks = [seq.held for seq in seqs]
        self.states = [seq.sampling for seq in seqs]
        self.rows = list(range(len(seqs)))
        self.counts = dict.fromkeys(self.seqs, 1)
        self.sample_rows = list(zip(self.seqs, self.rows, strict=True))
        self.token_ids = np.array([seq.tokens.last for seq in seqs], np.int32)
        self.context_len = np.array([held.num_computed for held in self.blocks], np.int32)
        self.stop_ids = np.array(sorted(frozenset().union(*{seq.owner.ends for seq in seqs})), np.int32)
        # Rows that are greedy as they are need no logits; min_tokens may stand in the way for some steps yet.
        self.steps_with_masks = max(s.params.min_tokens - s.num_output for s in self.states)
        self.is_plain = all(state.plain for state in self.states)
        self._manager = manager
        self._query_start = np.arange(len(seqs) + 1, dtype=np.int32)
        self._logit_rows = self._query_start[:-1]
        self._adapter_ids = adapter_ids(seqs)
        self._capacity = np.array([held.capacity_tokens for held in self.blocks])
        self._max_total = np.array([seq.owner.max_total_tokens for seq in seqs], np.int32)
        self._table = manager.block_tables(self.blocks)
        self._ahead: list[int] = []  # sequences that hold blocks for more than one step

    @property
    def needs_logits(self) -> bool:
        return self.steps_with_masks > 0 or not self.is_plain

    def advance(self, steps: int = 1) -> tuple[StepInputs, int] | None:
        """The next step, with blocks allocated, and how many can be made in a row from there on, at most `steps`.

        No sequence passes its end in them. For the first step blocks are taken as for any other, and None is returned
        where they are too few; further steps get those that are of no use to anybody, or are left out.
        """
        context_len = self.context_len + np.int32(1)
        for i in np.flatnonzero(self._capacity < context_len).tolist():
            if not self._manager.allocate(self.blocks[i], int(context_len[i])):
                return None
            self._take_over(i)
        if steps > 1:
            steps = self._reserve(context_len, steps)
        self.context_len = context_len
        sequences = Sequences(
            self._query_start, context_len, block_table=self._table, copies=self._manager.take_copies()
        )
        inputs = StepInputs(
            sequences=sequences, reach=self._max_total, logit_rows=self._logit_rows, adapter_ids=self._adapter_ids
        )
        return inputs, steps

    def take(self, tokens: NDArray[np.int32]) -> list[list[int]]:
        """What T >= 1 steps have brought, int32 [T, S], the last to be computed next: per sequence its new tokens.

        The blocks that were filled on the way are committed, those that were not reached are given back.
        """
        steps = len(tokens)
        new = tokens.T.tolist()
        self.token_ids = np.array(tokens[-1], np.int32)
        self.context_len = self.context_len + np.int32(steps - 1)
        self.steps_with_masks -= steps
        recycles = self._manager.recycles
        for i, (seq, held, ids, length) in enumerate(
            zip(self.seqs, self.blocks, new, self.context_len.tolist(), strict=True)
        ):
            for token in ids:
                seq.tokens.append(token)
                if seq.sampling.observes:
                    seq.sampling.observe(token)
            if length < held.next_event:
                held.num_computed = length
            else:
                self._manager.commit(held, seq.tokens.array, length)
                if recycles:
                    self._refresh_table(i)
        self.give_back()
        return new

    def give_back(self) -> None:
        """Part with blocks for tokens beyond context_len: the steps that they were for have not been made."""
        for i in self._ahead:
            self._manager.trim(self.blocks[i], int(self.context_len[i]))
            self._take_over(i)
        self._ahead = []

    def _reserve(self, context_len: NDArray[np.int32], steps: int) -> int:
        """Steps up to `steps`, the first with these lengths, for which there are blocks now."""
        steps = min(steps, int((self._max_total - context_len).min()))
        last = context_len + (steps - 1)
        short = np.flatnonzero(self._capacity < last).tolist()
        if short:
            if not self._manager.allocate_unused([(self.blocks[i], int(last[i])) for i in short]):
                return int((self._capacity - context_len).min()) + 1
            for i in short:
                self._take_over(i)
            self._ahead = short
        return steps

    def _take_over(self, i: int) -> None:
        """Sequence i has got blocks at its end, or given some back there."""
        self._capacity[i] = self.blocks[i].capacity_tokens
        self._refresh_table(i)

    def _refresh_table(self, i: int) -> None:
        """Sequence i has got blocks or given some back."""
        held = self.blocks[i]
        width = self._table.shape[2]
        if max(held.num_blocks) > width:
            self._table = self._manager.block_tables(self.blocks)
        else:
            own = held.table[:, :width]
            self._table[:, i, : own.shape[1]] = own
