"""Log-probabilities of given tokens from a plain forward: the decoder's own, or the native plan's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from plait.errors import EngineError
from plait.memory.layout import make_layout
from plait.ops.step import Sequences, StepInputs

if TYPE_CHECKING:
    from plait.engine.loading import LoadedModel
    from plait.model.decoder import Decoder
    from plait.weights.adapters import Adapter

# fp32 logits that exist at the same time, in numbers; the whole [tokens, vocabulary] matrix never does.
LOGIT_NUMBERS = 1 << 24
CHUNK_TOKENS = 512


class Forward(Protocol):
    """max_positions: the longest list of ids that it takes. kv_dtype: of its cache, None where it has none."""

    max_positions: int
    kv_dtype: str | None

    def logprobs(self, fed: list[int], targets: list[int]) -> list[float]:
        """log p of each target given the fed ids up to and including the one in its place: the targets stand opposite
        the last fed ids."""
        ...


class DecoderForward:
    """The decoder's forward, without a cache; with an adapter its recording, replayed."""

    def __init__(self, decoder: Decoder, adapter: Adapter | None = None) -> None:
        self.decoder = decoder
        self._adapted = None if adapter is None else AdaptedForward(decoder, adapter)
        self.kv_dtype: str | None = None
        self.max_positions = decoder.config.max_positions

    def logprobs(self, fed: list[int], targets: list[int]) -> list[float]:
        import torch

        from plait.decoding.scoring import target_nll

        decoder = self.decoder
        wanted = torch.tensor(targets, device=decoder.device)
        with torch.inference_mode():
            ids = torch.tensor(fed, device=decoder.device)
            hidden = (decoder(ids) if self._adapted is None else self._adapted.hidden(ids))[-len(targets) :]
            return (-target_nll(decoder, hidden, wanted).nll).tolist()


class AdaptedForward:
    """Hidden states of a decoder with an adapter, for one sequence and without a cache."""

    def __init__(self, decoder: Decoder, adapter: Adapter) -> None:
        from plait.model.record import record
        from plait.ops.interpreter import Interpreter
        from plait.weights.adapters import torch_factors

        self._interpreter = Interpreter(record(decoder), dict(decoder.named_parameters()))
        self._factors = [torch_factors(adapter, decoder.device)]

    def hidden(self, ids: Any) -> Any:
        """[N, D] after the final norm, for ids int64 [N]."""
        import torch

        from plait.memory.none import NoMemory
        from plait.ops.adapted import AdaptedRows

        step = NoMemory().begin(ids, None)
        inputs = {"ids": ids, "positions": step.positions, "logit_rows": ids.new_empty(0)}
        if "reach" in self._interpreter.recording.inputs:
            inputs["reach"] = step.reach
        adapted = AdaptedRows(torch.ones_like(ids), self._factors)
        return self._interpreter.run(inputs, step, adapted=adapted)["hidden"]


class PlanForward:
    """The native plan over a small cache for one sequence of at most `window` ids, in chunks."""

    def __init__(self, loaded: LoadedModel, window: int, kv_dtype: str, adapter: Adapter | None = None) -> None:
        from plait.engine.build import KV_DTYPES, make_executor

        vocab_size = loaded.config.vocab_size
        self.kv_dtype: str | None = kv_dtype
        self.max_positions = loaded.config.max_positions
        self.chunk = max(min(CHUNK_TOKENS, LOGIT_NUMBERS // vocab_size, window), 1)
        layout = make_layout(loaded.config.caches(), KV_DTYPES[kv_dtype], window, self.chunk)
        # Every group keeps all its blocks: a window of text is short, and blocks are only touched where they are used.
        counts = [-(-window // group.block_tokens) for group in layout.groups]
        self._table = np.zeros((len(counts), 1, max(counts)), np.int32)
        first = 1
        for g, count in enumerate(counts):
            self._table[g, 0, :count] = np.arange(first, first + count)
            first += count
        self._executor: Any = make_executor(loaded, layout, first, self.chunk, kv_dtype)
        self._adapter_ids = None if adapter is None else np.ones(1, np.int32)
        if adapter is not None:
            self._executor.set_adapters([adapter])

    def logprobs(self, fed: list[int], targets: list[int]) -> list[float]:
        ids = np.asarray(fed, np.int32)
        wanted = np.asarray(targets, np.int64)
        scored_from = len(fed) - len(targets)
        found: list[float] = []
        for start in range(0, len(ids), self.chunk):
            stop = min(start + self.chunk, len(ids))
            rows = np.arange(max(scored_from, start), stop, dtype=np.int32) - start
            sequences = Sequences(np.array([0, stop - start], np.int32), np.array([stop], np.int32), self._table)
            reach = np.full(stop - start, len(ids), np.int32)
            inputs = StepInputs(sequences=sequences, reach=reach, logit_rows=rows, adapter_ids=self._adapter_ids)
            result = self._executor.execute(ids[start:stop], inputs, logits=len(rows) > 0)
            if len(rows):
                found += _chosen(result.logits, wanted[start + rows[0] - scored_from : stop - scored_from])
        return found


def _chosen(logits: Any, wanted: Any) -> list[float]:
    """log-softmax of each row [R, V] at its wanted id; the logits are used up."""
    own = logits[np.arange(len(wanted)), wanted].astype(np.float64)
    highest = logits.max(axis=1)
    if not np.isfinite(highest).all():
        raise EngineError("the model produced logits that are not finite (NaN or infinity)")
    np.subtract(logits, highest[:, None], out=logits)
    np.exp(logits, out=logits)
    return (own - highest - np.log(logits.sum(axis=1, dtype=np.float64))).tolist()
