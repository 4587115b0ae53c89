"""What the sampler remembers about one choice: its biases and masks, its token counts, its DRY matches."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from plait.engine.dry import DryState
from plait.engine.params import BAN, FORCE, SamplingParams
from plait.engine.tokens import TokenBuffer


class TokenCounts:
    """Distinct tokens of prompt and output with their number of occurrences in the output, updated per token."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        ids = np.unique(prompt)
        self._slot = {token: i for i, token in enumerate(ids.tolist())}
        self._ids = np.zeros(len(ids) + 64, np.int64)
        self._ids[: len(ids)] = ids
        self._output = np.zeros(len(self._ids), np.int32)

    def add(self, token: int) -> None:
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._output = np.concatenate([self._output, np.zeros_like(self._output)])
        self._ids[slot] = token
        self._output[slot] += 1

    def apply(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        """Penalties on logits float32 [V] in place: repetition (prompt and output), then presence and frequency."""
        count = len(self._slot)
        ids, output = self._ids[:count], self._output[:count]
        if len(logits) <= int(ids.max(initial=0)):  # prompt ids in rows that are never sampled
            inside = ids < len(logits)
            ids, output = ids[inside], output[inside]
        values = logits[ids]
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= np.float32(params.frequency_penalty) * output
        values -= np.float32(params.presence_penalty) * (output > 0)
        logits[ids] = values


class SamplingState:
    """One choice as the sampler sees it. `tokens` (prompt and output) is shared with the scheduler's sequence.

    params: with words resolved to ids. seed: 64 bits. choice: index among the request's choices.
    end_ids: what min_tokens masks (the model's end tokens and stop_token_ids). vocab_size: tokens that may be sampled.
    observes: whether observe() does anything. plain: whether nothing but min_tokens can keep it from taking the largest
    logit. native: its draws as the native library takes them (native_sampling).
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: TokenBuffer,
        num_prompt: int,
        seed: int,
        choice: int,
        end_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.tokens = tokens
        self.num_prompt = num_prompt
        self.seed = seed
        self.choice = choice
        self._end_ids = _index(i for i in end_ids if i < vocab_size)
        added = {i: b for i, b in params.logit_bias.items() if BAN < b < FORCE}
        self._bias_ids = _index(added)
        self._bias = np.fromiter(added.values(), np.float32, len(added))
        self._banned = _index(i for i, b in params.logit_bias.items() if b <= BAN)
        self._forced = _index(i for i, b in params.logit_bias.items() if b >= FORCE)
        self._allowed = None if params.allowed_token_ids is None else _index(params.allowed_token_ids)
        self._bad_words = [np.asarray(w, np.int32) for w in params.bad_words_token_ids or () if len(w)]
        self._counts = TokenCounts(tokens.array[:num_prompt]) if params.uses_penalties else None
        self._dry = DryState(params, vocab_size) if params.uses_dry else None
        for token in tokens.array[num_prompt:].tolist():
            self.observe(token)
        self._always = bool(
            params.logit_bias or self._allowed is not None or self._bad_words or self._counts or self._dry
        )
        self.observes = self._counts is not None
        self.plain = params.greedy and params.logprobs is None and not self._always
        self.native = native_sampling(params, seed, choice)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def adjusts(self) -> bool:
        """True when the next token's logits are changed before anything is chosen."""
        return self._always or self.num_output < self.params.min_tokens

    @property
    def greedy_as_is(self) -> bool:
        """True when the next token is simply the largest logit and nothing is reported."""
        return self.plain and self.num_output >= self.params.min_tokens

    def observe(self, token: int) -> None:
        """Count a token that was appended to `tokens`."""
        if self._counts is not None:
            self._counts.add(token)

    def adjust(self, x: NDArray[np.float32]) -> None:
        """Bias and masks, penalties, DRY on the logits x float32 [V] in place."""
        if len(self._bias_ids):
            x[self._bias_ids] += self._bias
        if self._allowed is not None:
            _keep_only(x, self._allowed)
        x[self._banned] = -np.inf
        if self.num_output < self.params.min_tokens:
            x[self._end_ids] = -np.inf
        output = self.tokens.array[self.num_prompt :]
        for word in self._bad_words:
            before = len(word) - 1
            if before <= len(output) and np.array_equal(output[len(output) - before :], word[:-1]):
                x[word[-1]] = -np.inf
        if len(self._forced):
            possible = self._forced[x[self._forced] > -np.inf]
            if len(possible):
                _keep_only(x, possible)
        if self._counts is not None:
            self._counts.apply(x, self.params)
        if self._dry is not None:
            self._dry.apply(x, self.tokens.array)


_SAMPLING = struct.Struct("=8dQIIii")
NATIVE_SAMPLING = np.dtype(
    [(name, np.float64) for name in ("temperature", "min_p", "typical_p", "top_p", "xtc_probability", "xtc_threshold")]
    + [("u", np.float64), ("coin", np.float64), ("seed", np.uint64), ("position", np.uint32), ("choice", np.uint32)]
    + [("top_k", np.int32), ("seeded", np.int32)]
)


def native_sampling(params: SamplingParams, seed: int, choice: int) -> bytes:
    """One PlaitSampling (csrc/plait_native.h, NATIVE_SAMPLING) of a choice, at output position 0."""
    return _SAMPLING.pack(
        0.0 if params.greedy else params.temperature,
        params.min_p,
        params.typical_p,
        params.top_p,
        params.xtc_probability,
        params.xtc_threshold,
        0.0,
        0.0,
        seed,
        0,
        choice,
        min(params.top_k, (1 << 31) - 1),
        1,
    )


def _index(ids: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(ids, np.int64)


def _keep_only(x: NDArray[np.float32], ids: NDArray[np.int64]) -> None:
    kept = x[ids]
    x.fill(-np.inf)
    x[ids] = kept
