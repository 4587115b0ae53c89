"""What the engine asks of whatever computes a step: the reference operations, a native plan, or a test's model."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plait.memory.layout import CacheLayout
from plait.ops.step import StepInputs


class Executor(Protocol):
    """Computes one step over a paged cache that it owns.

    vocab_size: columns of the logits (rows of the output embedding). layout: how its cache divides into groups.
    num_blocks: blocks of its pool, the null block included. max_batched_tokens: most flat tokens of a step.
    """

    vocab_size: int
    layout: CacheLayout
    num_blocks: int
    max_batched_tokens: int

    def execute(self, token_ids: NDArray[np.int32], inputs: StepInputs) -> NDArray[np.float32]:
        """Run the step: token_ids int32 [N] -> logits float32 [R, vocab_size] of the R rows inputs.logit_rows.

        First carries out inputs.sequences.copies, in order; then writes the keys and values of the N
        tokens and attends. The array that it returns is the caller's until the next call.
        """
        ...
