"""The executor that runs the decoder itself, one reference operation at a time, on its live parameters."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from plait.engine.executor import StepResult, best_of
from plait.memory.layout import CacheLayout
from plait.memory.paged import PagedMemory
from plait.model.decoder import Decoder, evaluating
from plait.ops.step import StepInputs


class ReferenceExecutor:
    """See plait.engine.executor.Executor. Owns a paged memory of num_blocks blocks beside the decoder.

    sampled_ids: default the whole vocabulary.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: CacheLayout,
        num_blocks: int,
        max_batched_tokens: int,
        kv_dtype: torch.dtype | None = None,
        *,
        sampled_ids: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_batched_tokens = max_batched_tokens
        self.vocab_size = decoder.config.vocab_size
        self.sampled_ids = self.vocab_size if sampled_ids is None else min(sampled_ids, self.vocab_size)
        self.memory = PagedMemory(layout, num_blocks, kv_dtype or decoder.dtype, decoder.device)

    def execute(
        self, token_ids: NDArray[np.int32], inputs: StepInputs, *, logits: bool = True, hidden: bool = False
    ) -> StepResult:
        """See Executor.execute. The logits are computed in any case: the best ids come from them."""
        decoder, device = self.decoder, self.decoder.device
        with evaluating(decoder), torch.inference_mode():
            ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(device)
            states = decoder(ids, inputs, self.memory)
            if len(inputs.logit_rows):
                rows = torch.from_numpy(np.asarray(inputs.logit_rows, np.int64)).to(device)
                numbers = decoder.logits(states.index_select(0, rows)).cpu().numpy()
            else:  # the forward was for its keys and values
                numbers = np.empty((0, self.vocab_size), np.float32)
            best_ids, best_values = best_of(numbers, self.sampled_ids)
            asked = states.float().cpu().numpy() if hidden else None
            return StepResult(best_ids, best_values, numbers if logits else None, asked)

    def touched_bytes(self) -> int | None:
        """Bytes of the pool that lie in memory now; None where the platform does not say."""
        return self.memory.touched_bytes()
