"""The host sampler: logits of a step -> one token per row, with the log-probabilities that were asked for.

Order: bias and masks, penalties, DRY, temperature, min-p, top-k, typical-p, top-p, XTC, draw. Filters see the
distribution that the ones before them left, renormalised. Reported log-probabilities are of the raw logits.

Where the native library is loaded it filters and draws, on the process's threads; without it numpy does
(plait.engine.filters). Both give the same tokens. Greedy rows that nothing changes need no logits at all: the executor
has found their largest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plait.engine import filters
from plait.engine.executor import StepResult
from plait.engine.params import SamplingParams
from plait.engine.philox import uniforms
from plait.engine.sampling_state import NATIVE_SAMPLING, SamplingState
from plait.engine.token_output import TokenLogprobs
from plait.errors import EngineError
from plait.kernels import native

NOT_FINITE = "the model produced logits that are not finite (NaN or infinity)"
NOTHING_LEFT = "the request's masks and biases leave no token to choose"
TOO_LARGE = "the request's penalties and biases make logits that are too large for float32"

# Rows whose logits are changed are copied, so many at a time.
_ADJUSTED_ROWS = 8
_NO_WEIGHTS = np.empty(0, np.int64)


@dataclass(slots=True)
class Samples:
    """The tokens chosen for R rows. token_ids: -1 where there is none, and then `errors` says why.

    logprobs: of the rows that asked for them.
    """

    token_ids: list[int]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Chooses tokens for the rows of a step. vocab_size: columns at and beyond it are never sampled.

    use_native: False keeps to numpy where the native library is there.
    """

    def __init__(self, vocab_size: int, use_native: bool = True) -> None:
        self.vocab_size = vocab_size
        library = native.native_library() if use_native else None
        self._native = None if library is None else library.functions
        self.compute_s = 0.0  # in the native library, all calls together
        # Fresh arrays of these sizes would cost page faults for every row.
        self._adjusted = np.empty((0, vocab_size), np.float32)
        self._raw = np.empty(vocab_size, np.float32)

    def sample(self, result: StepResult, rows: Sequence[int], states: Sequence[SamplingState]) -> Samples:
        """Row rows[i] of a step's result for states[i]. Its logits are not changed, nor read where nobody has to."""
        ids, values = result.best_ids, result.best_values
        if len(rows) != len(ids) or rows != list(range(len(ids))):
            ids, values = ids[rows], values[rows]
        samples = Samples(ids.tolist())
        finite = np.isfinite(values)
        if not finite.all():
            for i in np.flatnonzero(~finite).tolist():
                samples.token_ids[i], samples.errors[i] = -1, NOT_FINITE
        self._sample_others(result, rows, states, samples)
        return samples

    def _sample_others(
        self, result: StepResult, rows: Sequence[int], states: Sequence[SamplingState], samples: Samples
    ) -> None:
        """The rows for which the largest logit is not the answer, or not all of it."""
        drawn, adjusted, reported = [], [], []
        for i, state in enumerate(states):
            if state.greedy_as_is or i in samples.errors:
                continue
            if state.adjusts:
                adjusted.append(i)
            elif not state.params.greedy:
                drawn.append(i)
            if state.params.logprobs is not None:
                reported.append(i)
        logits = result.logits
        if not (drawn or adjusted or reported):
            return
        assert logits is not None, "rows that are not plainly greedy need their logits"
        if drawn:
            self._draw_rows(logits, [rows[i] for i in drawn], drawn, states, samples)
        for start in range(0, len(adjusted), _ADJUSTED_ROWS):
            self._sample_adjusted(logits, rows, adjusted[start : start + _ADJUSTED_ROWS], states, samples)
        for i in reported:
            count = states[i].params.logprobs
            if i not in samples.errors and count is not None:
                samples.logprobs[i] = self.logprobs(logits[rows[i]], samples.token_ids[i], count)

    def _sample_adjusted(
        self,
        logits: NDArray[np.float32],
        rows: Sequence[int],
        which: list[int],
        states: Sequence[SamplingState],
        samples: Samples,
    ) -> None:
        """Rows with biases, masks, penalties: on copies of them."""
        if not len(self._adjusted):
            self._adjusted = np.empty((_ADJUSTED_ROWS, self.vocab_size), np.float32)
        for place, i in enumerate(which):
            x = self._adjusted[place]
            np.copyto(x, logits[rows[i], : self.vocab_size])
            with np.errstate(over="ignore", invalid="ignore"):  # judged by the draw
                states[i].adjust(x)
        self._draw_rows(self._adjusted, list(range(len(which))), which, states, samples)
        for place, i in enumerate(which):
            if samples.token_ids[i] < 0:
                samples.errors[i] = NOTHING_LEFT if self._adjusted[place].max() < 0 else TOO_LARGE

    def _draw_rows(
        self,
        logits: NDArray[np.float32],
        rows: list[int],
        which: list[int],
        states: Sequence[SamplingState],
        samples: Samples,
    ) -> None:
        """Row rows[k] of the logits for states[which[k]]; the token goes to that place, -1 where there is none."""
        own = [states[i] for i in which]
        if self._native is not None:
            tokens = self._draw_native(logits, rows, own)
        else:
            draws = uniforms([s.seed for s in own], [s.choice for s in own], [s.num_output for s in own])
            tokens = [
                self._draw(logits[row, : self.vocab_size], state.params, u, coin)
                for row, state, (u, coin) in zip(rows, own, draws.tolist(), strict=True)
            ]
        for i, token in zip(which, tokens, strict=True):
            samples.token_ids[i] = token

    def _draw_native(self, logits: NDArray[np.float32], rows: list[int], states: list[SamplingState]) -> list[int]:
        if len(set(rows)) < len(rows):  # choices that begin together draw from the same row
            logits, rows = logits[rows], list(range(len(rows)))
        # Rows that nobody asks about have a negative temperature; none of them lie before the first and after the last.
        first, last = rows[0], rows[-1]
        params = np.zeros(last - first + 1, NATIVE_SAMPLING)
        if len(params) > len(rows):
            params["temperature"] = -1
        places = [row - first for row in rows]
        params[places] = np.frombuffer(b"".join([state.native for state in states]), NATIVE_SAMPLING)
        params["position"][places] = [state.num_output for state in states]
        tokens = np.full(len(params), -1, np.int32)
        assert self._native is not None
        if logits.strides[1] != 4:
            logits = np.ascontiguousarray(logits)
        start = time.perf_counter()
        status = self._native.plait_sample(
            logits[first:].ctypes.data, logits.strides[0] // 4, len(params), self.vocab_size, params.ctypes.data,
            tokens.ctypes.data,
        )  # fmt: skip
        self.compute_s += time.perf_counter() - start
        if status != 0:
            raise EngineError(self._native.plait_last_error().decode())
        return tokens[places].tolist()

    def _draw(self, x: NDArray[np.float32], params: SamplingParams, u: float, coin: float) -> int:
        """Filter the logits x [V] and draw with u; coin decides on XTC. -1 where the largest is not finite."""
        highest = x.max()
        if not np.isfinite(highest):
            return -1
        if params.greedy:
            return int(x.argmax())
        left = _Left(x)
        left.keep(filters.min_p(x, highest, params.temperature, params.min_p))
        left.keep(filters.top_k(left.z, params.top_k))
        # In float32 a difference or a product may overflow to -inf, which is a probability of 0 all the same.
        with np.errstate(over="ignore"):
            left.z = (left.z - highest) * np.float32(1 / params.temperature)
        left.w = filters.weights(left.z)
        left.keep(filters.typical_p(left.z, left.w, params.typical_p))
        left.keep(filters.top_p(left.z, left.w, params.top_p))
        if coin < params.xtc_probability:
            left.keep(filters.xtc(left.z, left.w, params.xtc_threshold))
        position = filters.draw(left.w, u)
        return position if left.ids is None else int(left.ids[position])

    def logprobs(self, row: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
        """log-softmax of one raw row [columns]: the token's value and rank, and the `count` best."""
        highest = row.max()
        if not np.isfinite(highest):
            return TokenLogprobs(token_id, float("nan"), 0)
        if len(self._raw) != len(row):
            self._raw = np.empty(len(row), np.float32)
        weights = np.exp(np.subtract(row, highest, out=self._raw), out=self._raw)
        normaliser = float(highest) + float(np.log(np.add.reduce(weights, dtype=np.float64)))
        sampled = row[: self.vocab_size]
        own = row[token_id]
        rank = 1 + int(np.count_nonzero(sampled > own)) + int(np.count_nonzero(sampled[:token_id] == own))
        best = filters.largest(sampled, count)
        top = [(i, float(v) - normaliser) for i, v in zip(best.tolist(), sampled[best].tolist(), strict=True)]
        return TokenLogprobs(token_id, float(own) - normaliser, rank, top)


class _Left:
    """The tokens that filters have left: their ids, ascending (None: all), their logits (then z) and weights."""

    def __init__(self, x: NDArray[np.float32]) -> None:
        self.ids: filters.Ids | None = None
        self.z = x
        self.w: filters.Weights = _NO_WEIGHTS

    def keep(self, positions: filters.Ids | None) -> None:
        """Keep these positions only; None keeps all."""
        if positions is not None:
            self.ids = positions if self.ids is None else self.ids[positions]
            self.z = self.z[positions]
            if self.w is not _NO_WEIGHTS:
                self.w = self.w[positions]
