"""Steps in which every running sequence decodes one token, which are nearly all: the arrays are kept and advanced.

What the scheduler and the batch would find out anew for every sequence in every step (no budget is short, nobody can
be admitted, each block table is as it was) is known here, until a sequence comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.engine.request import SequenceState
from plait.memory.blocks import BlockManager
from plait.ops.step import Sequences, StepInputs


class SteadyBatch:
    """The S sequences of a step that has been done, all of them decoding, in the scheduler's order.

    version: the scheduler's when this was made; with any other one it is void. token_ids: int32 [S], the newest token
    of each. context_len: int32 [S], tokens in the cache once the present step is done.
    """

    def __init__(self, seqs: Sequence[SequenceState], manager: BlockManager, version: int) -> None:
        self.seqs = list(seqs)
        self.version = version
        self.blocks = [seq.held for seq in seqs]
        self.states = [seq.sampling for seq in seqs]
        self.rows = list(range(len(seqs)))
        self.counts = dict.fromkeys(self.seqs, 1)
        self.sample_rows = list(zip(self.seqs, self.rows, strict=True))
        self.token_ids = np.array([seq.tokens.last for seq in seqs], np.int32)
        self.context_len = np.array([held.num_computed for held in self.blocks], np.int32)
        # Rows that are greedy as they are need no logits; min_tokens may stand in the way for some steps yet.
        self.steps_with_masks = max(s.params.min_tokens - s.num_output for s in self.states)
        self.is_plain = all(state.plain for state in self.states)
        self._manager = manager
        self._query_start = np.arange(len(seqs) + 1, dtype=np.int32)
        self._logit_rows = self._query_start[:-1]
        self._capacity = np.array([held.capacity_tokens for held in self.blocks])
        self._table = manager.block_tables(self.blocks)

    @property
    def needs_logits(self) -> bool:
        return self.steps_with_masks > 0 or not self.is_plain

    def advance(self) -> StepInputs | None:
        """The next step, with blocks allocated; None where they are too few."""
        context_len = self.context_len + np.int32(1)
        short = np.flatnonzero(self._capacity < context_len)
        for i in short.tolist():
            held = self.blocks[i]
            if not self._manager.allocate(held, int(context_len[i])):
                return None
            self._capacity[i] = held.capacity_tokens
            self.refresh_table(i)
        self.context_len = context_len
        sequences = Sequences(
            self._query_start, context_len, block_table=self._table, copies=self._manager.take_copies()
        )
        return StepInputs(sequences=sequences, logit_rows=self._logit_rows)

    def take(self, tokens: list[int]) -> None:
        """The tokens that the step has brought, to be computed in the next one."""
        self.token_ids = np.array(tokens, np.int32)
        self.steps_with_masks -= 1

    def refresh_table(self, i: int) -> None:
        """Sequence i has got blocks or given some back."""
        held = self.blocks[i]
        width = self._table.shape[2]
        if max(held.num_blocks) > width:
            self._table = self._manager.block_tables(self.blocks)
        else:
            own = held.table[:, :width]
            self._table[:, i, : own.shape[1]] = own
