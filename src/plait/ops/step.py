"""The metadata of one step: what the forward is told about its flat tokens, apart from their ids.

This is also the binary interface of native plans: contiguous int32 arrays, nothing else. It imports
no torch, so that scheduler, server and block manager can build a step without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Sequences:
    """Bounds of the S sequences inside the N flat tokens of a step, and where their cache lives.

    query_start: int32 [S + 1]; tokens query_start[s] .. query_start[s + 1] - 1 belong to sequence s.
    context_len: int32 [S]; tokens of sequence s in the cache once this step's are written, so the
        j-th of its q query tokens stands at position context_len[s] - q + j.
    block_table: int32 [G, S, B] for paged memory: block ids per cache group, position order, block 0
        (the null block) where a block fell out of the window or lies beyond the end. None otherwise.
    copies: int32 [C, 2]; (source, destination) block ids to copy before anything is written
        (copy-on-write of shared blocks).
    """

    query_start: Int32
    context_len: Int32
    block_table: Int32 | None = None
    copies: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))

    @property
    def count(self) -> int:
        return len(self.context_len)

    def positions(self) -> Int32:
        """Position of every flat token, int32 [N]."""
        query_len = np.diff(self.query_start)
        first = self.context_len - query_len
        token = np.arange(self.query_start[-1], dtype=np.int32)
        return (token - np.repeat(self.query_start[:-1], query_len) + np.repeat(first, query_len)).astype(np.int32)


@dataclass(frozen=True)
class StepInputs:
    """Everything beside the ids that a forward may need; all optional, derived when absent.

    positions: int [...] like ids (tensor or int32 array); default 0 .. T - 1 per row, or from `sequences`.
    token_mask: bool [B, T], False at padding (training and dense batches).
    reach: int [...] like ids; the most tokens that the token's sequence will ever have, which LongRoPE chooses its
        table by. A forward without memory derives it; one with a memory needs it given, the same in every step.
    segment_ids: int [B, T]; tokens of different segments do not see each other (packed documents).
    sequences: bounds of a flat serving step.
    logit_rows: int32 [R]; flat rows whose logits the caller wants.
    adapter_ids: int32 [S]; 0 means no adapter.
    """

    positions: Any = None
    reach: Any = None
    token_mask: Any = None
    segment_ids: Any = None
    sequences: Sequences | None = None
    logit_rows: Any = None
    adapter_ids: Any = None


@dataclass(frozen=True)
class StepResult:
    """What a step computed. The arrays are the caller's until the next step.

    best_ids: int32 [R], the highest logit of each row among the columns that may be sampled, lowest id on ties.
    best_values: float32 [R], its logit; NaN where any of those logits is NaN. logits: float32 [R, V], None where
    they were not asked for. hidden: float32 [N, D] after the final norm, None where it was not asked for.
    """

    best_ids: Int32
    best_values: Float32
    logits: Float32 | None = None
    hidden: Float32 | None = None
