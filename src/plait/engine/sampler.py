"""The host sampler: logits of a step -> one token per row, with the log-probabilities that were asked for.

Order: bias and masks, penalties, DRY, temperature, min-p, top-k, typical-p, top-p, XTC, draw. Filters see the
distribution that the ones before them left, renormalised. Reported log-probabilities are of the raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.engine import filters
from plait.engine.params import SamplingParams
from plait.engine.philox import uniforms
from plait.engine.sampling_state import SamplingState
from plait.engine.token_output import TokenLogprobs

NOT_FINITE = "the model produced logits that are not finite (NaN or infinity)"
NOTHING_LEFT = "the request's masks and biases leave no token to choose"
TOO_LARGE = "the request's penalties and biases make logits that are too large for float32"


@dataclass
class Sample:
    """The token chosen for a row, or why there is none."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens for the rows of a step. vocab_size: columns at and beyond it are never sampled."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # Fresh arrays of this size would cost page faults for every row.
        self._adjusted = np.empty(vocab_size, np.float32)
        self._z = np.empty(vocab_size, np.float32)
        self._e = np.empty(vocab_size, np.float32)
        self._raw = np.empty(vocab_size, np.float32)

    def sample(self, logits: NDArray[np.float32], states: Sequence[SamplingState]) -> list[Sample]:
        """logits float32 [R, columns >= vocab_size], row r for states[r] -> R samples; logits are not changed."""
        if all(state.greedy_as_is for state in states):
            sampled = logits[:, : self.vocab_size]
            best = sampled.argmax(axis=1)  # the first of equals; a NaN where there is one
            finite = np.isfinite(sampled[np.arange(len(best)), best])
            return [
                Sample(token) if ok else Sample(error=NOT_FINITE)
                for token, ok in zip(best.tolist(), finite.tolist(), strict=True)
            ]
        draws = uniforms([s.seed for s in states], [s.choice for s in states], [s.num_output for s in states])
        samples = []
        for row, state, (u, coin) in zip(logits, states, draws.tolist(), strict=True):
            sample = self._choose(row[: self.vocab_size], state, u, coin)
            if state.params.logprobs is not None and sample.error is None:
                sample.logprobs = self.logprobs(row, sample.token_id, state.params.logprobs)
            samples.append(sample)
        return samples

    def _choose(self, x: NDArray[np.float32], state: SamplingState, u: float, coin: float) -> Sample:
        highest = x.max()
        if not np.isfinite(highest):
            return Sample(error=NOT_FINITE)
        if state.adjusts:
            np.copyto(self._adjusted, x)
            x = self._adjusted
            with np.errstate(over="ignore", invalid="ignore"):  # judged below
                state.adjust(x)
            highest = x.max()
            if not np.isfinite(highest):
                return Sample(error=NOTHING_LEFT if highest < 0 else TOO_LARGE)
        params = state.params
        if params.greedy:
            return Sample(int(x.argmax()))
        return Sample(self._draw(x, highest, params, u, coin))

    def _draw(self, x: NDArray[np.float32], highest: np.float32, params: SamplingParams, u: float, coin: float) -> int:
        """Filter the logits x [V], whose largest is `highest`, and draw with u; coin decides on XTC."""
        left = _Left(x)
        left.keep(filters.min_p(x, highest, params.temperature, params.min_p))
        left.keep(filters.top_k(left.values, params.top_k))
        z, e = self._z[: len(left.values)], self._e[: len(left.values)]
        np.subtract(left.values, highest, out=z)
        # In float32 a quotient may overflow to -inf, which is a probability of 0 all the same.
        with np.errstate(over="ignore"):
            np.divide(z, np.float32(params.temperature), out=z)
        left.values = np.exp(z, out=e)
        left.keep(filters.typical_p(z, e, params.typical_p))
        left.keep(filters.top_p(left.values, params.top_p))
        if coin < params.xtc_probability:
            left.keep(filters.xtc(left.values, params.xtc_threshold))
        position = filters.draw(left.values, u)
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
    """The tokens that filters have left: their ids, ascending (None: all), and a value for each."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.ids: filters.Ids | None = None
        self.values = values

    def keep(self, positions: filters.Ids | None) -> None:
        """Keep these positions only; None keeps all."""
        if positions is not None:
            self.ids = positions if self.ids is None else self.ids[positions]
            self.values = self.values[positions]
