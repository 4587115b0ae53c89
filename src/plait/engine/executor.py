"""What the engine asks of whatever computes a step: the reference operations, a native plan, or a test's model."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plait.memory.layout import CacheLayout
from plait.ops.step import StepInputs, StepResult

__all__ = ["Executor", "StepResult", "best_of"]


class Executor(Protocol):
    """Computes one step over a paged cache that it owns.

    vocab_size: columns of the logits (rows of the output embedding). sampled_ids: columns at and beyond it are never
    sampled (the tokenizer's size). layout: how its cache divides into groups. num_blocks: blocks of its pool, the null
    block included. max_batched_tokens: most flat tokens of a step.

    What else an executor may have: compute_s (seconds that the last call computed), refresh(), prepare_hidden(),
    touched_bytes(), set_adapters() and adapter_bytes, and, to make greedy steps in a row, max_steps, execute_steps()
    and interrupt(): see plait.plan.executor.NativeExecutor.
    """

    vocab_size: int
    sampled_ids: int
    layout: CacheLayout
    num_blocks: int
    max_batched_tokens: int

    def execute(
        self, token_ids: NDArray[np.int32], inputs: StepInputs, *, logits: bool = True, hidden: bool = False
    ) -> StepResult:
        """Run the step: token_ids int32 [N] -> results of the R rows inputs.logit_rows.

        First carries out inputs.sequences.copies, in order; then writes the keys and values of the N
        tokens and attends. logits, hidden: whether the caller reads those arrays of the result.
        """
        ...


def best_of(logits: NDArray[np.float32], sampled_ids: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """best_ids and best_values of StepResult from logits float32 [R, columns]."""
    sampled = logits[:, :sampled_ids]
    ids = sampled.argmax(axis=1)  # the first of equals; a NaN where there is one
    return ids.astype(np.int32), sampled[np.arange(len(ids)), ids]
