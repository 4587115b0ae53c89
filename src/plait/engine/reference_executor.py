"""The executor that runs the decoder itself, one reference operation at a time, on its live parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from plait.engine.executor import StepResult, best_of
from plait.errors import EngineError
from plait.memory.layout import CacheLayout
from plait.memory.paged import PagedMemory
from plait.model.decoder import Decoder, evaluating
from plait.model.record import record
from plait.ops.adapted import AdaptedRows, Factors
from plait.ops.interpreter import Interpreter
from plait.ops.step import StepInputs
from plait.weights.adapters import torch_factors

if TYPE_CHECKING:
    from torch import Tensor

    from plait.weights.adapters import Adapter


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
        self._adapters: list[dict[str, Factors]] = []
        self._interpreter: Interpreter | None = None

    def set_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Take these in place of what there was; steps name them by 1, 2, ... in this order.

        A step with adapters replays the recording, on the same live parameters.
        """
        self._adapters = [torch_factors(adapter, self.decoder.device) for adapter in adapters]

    def execute(
        self, token_ids: NDArray[np.int32], inputs: StepInputs, *, logits: bool = True, hidden: bool = False
    ) -> StepResult:
        """See Executor.execute. The logits are computed in any case: the best ids come from them."""
        decoder, device = self.decoder, self.decoder.device
        with evaluating(decoder), torch.inference_mode():
            ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(device)
            if inputs.adapter_ids is not None and np.any(inputs.adapter_ids):
                states, numbers = self._adapted(ids, inputs)
            else:
                states = decoder(ids, replace(inputs, adapter_ids=None), self.memory)
                numbers = self._logits(states, inputs)
            best_ids, best_values = best_of(numbers, self.sampled_ids)
            asked = states.float().cpu().numpy() if hidden else None
            return StepResult(best_ids, best_values, numbers if logits else None, asked)

    def _logits(self, states: Tensor, inputs: StepInputs) -> NDArray[np.float32]:
        if not len(inputs.logit_rows):  # the forward was for its keys and values
            return np.empty((0, self.vocab_size), np.float32)
        rows = torch.from_numpy(np.asarray(inputs.logit_rows, np.int64)).to(states.device)
        return self.decoder.logits(states.index_select(0, rows)).cpu().numpy()

    def _adapted(self, ids: Tensor, inputs: StepInputs) -> tuple[Tensor, NDArray[np.float32]]:
        """Hidden states and logits of a step in which some sequences have adapters."""
        sequences, numbers = inputs.sequences, np.asarray(inputs.adapter_ids, np.int64)
        if sequences is None or numbers.shape != (sequences.count,):
            raise EngineError(f"a step with adapter_ids {numbers.shape} for its sequences")
        if numbers.min() < 0 or numbers.max() > len(self._adapters):
            raise EngineError(f"a step with adapter {numbers.max()} of {len(self._adapters)}")
        if self._interpreter is None:
            self._interpreter = Interpreter(record(self.decoder), dict(self.decoder.named_parameters()))
        step = self.memory.begin(ids, replace(inputs, adapter_ids=None))
        rows = torch.from_numpy(np.asarray(inputs.logit_rows, np.int64)).to(ids.device)
        given = {"ids": ids, "positions": step.positions, "logit_rows": rows}
        if "reach" in self._interpreter.recording.inputs:
            given["reach"] = step.reach
        of_token = torch.from_numpy(np.repeat(numbers, np.diff(sequences.query_start))).to(ids.device)
        adapted = AdaptedRows(of_token, self._adapters)
        out = self._interpreter.run(given, step, adapted=adapted)
        return out["hidden"], out["logits"].cpu().numpy()

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapters' numbers."""
        numbers = {id(x): x.nbytes for factors in self._adapters for f in factors.values() for x in (f.a, f.b)}
        return sum(numbers.values())

    def touched_bytes(self) -> int | None:
        """Bytes of the pool that lie in memory now; None where the platform does not say."""
        return self.memory.touched_bytes()
