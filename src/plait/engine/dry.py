"""DRY: a penalty on the token that would prolong a repetition of what the context already holds.

Semantics: llama.cpp's sampler of that name. For every earlier place where the last L tokens stand too
(L at least dry_allowed_length), the token that followed there loses
multiplier * base^(L - allowed_length). A sequence breaker ends the repetition that counts.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from plait.engine.params import SamplingParams

_FLOAT32_MAX_LOG = 88.7228391


class DryState:
    """Match lengths of one sequence, kept up to date token by token.

    Entry i is the length of the longest common suffix of tokens[: i + 1] and the whole context; when token t
    is appended it becomes (entry i - 1) + 1 where tokens[i] == t, else 0: one vectorised pass per token.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._params = params
        self._lengths = np.empty(0, np.int32)
        self._seen = 0
        self._tails: dict[int, list[NDArray[np.int32]]] = {}
        for sequence in params.dry_breaker_token_ids or ():
            self._tails.setdefault(sequence[0], []).append(np.asarray(sequence[1:], np.int32))
        self._is_head = np.zeros(vocab_size, bool)
        self._is_head[[head for head in self._tails if head < vocab_size]] = True
        # Tokens that hold a whole breaker are never penalised.
        self._exempt = {head for head, tails in self._tails.items() if any(len(t) == 0 for t in tails)}

    def apply(self, logits: NDArray[np.float32], tokens: NDArray[np.int32]) -> None:
        """Subtract the penalties from logits float32 [V] in place; tokens int32 [n] is prompt and output."""
        params = self._params
        self._advance(tokens)
        window = len(tokens) if params.dry_penalty_last_n < 0 else min(len(tokens), params.dry_penalty_last_n)
        allowed = params.dry_allowed_length
        if window <= allowed or window < 2:
            return
        limit = self._repeat_limit(tokens[len(tokens) - window :])
        if limit < allowed:
            return
        start = len(tokens) - window
        lengths = np.minimum(self._lengths[start:], np.arange(1, window, dtype=np.int32))
        lengths = np.minimum(lengths, limit)
        ends = np.flatnonzero(lengths >= allowed)
        longest: dict[int, int] = {}
        for token, length in zip(tokens[start + 1 + ends].tolist(), lengths[ends].tolist(), strict=True):
            if length > longest.get(token, -1):
                longest[token] = length
        largest = int(_FLOAT32_MAX_LOG / math.log(params.dry_base)) if params.dry_base > 1.000001 else 0
        for token, length in longest.items():
            if token in self._exempt or token >= len(logits):
                continue
            exponent = length - allowed
            if largest > 0:
                exponent = min(exponent, largest)
            penalty = params.dry_multiplier * params.dry_base**exponent
            logits[token] -= np.float32(min(penalty, float(np.finfo(np.float32).max)))

    def _advance(self, tokens: NDArray[np.int32]) -> None:
        if self._seen == 0 or len(tokens) - self._seen > 64:
            self._lengths = suffix_matches(tokens)
        else:
            for n in range(self._seen, len(tokens)):
                grown = np.zeros(n, np.int32)
                grown[1:] = self._lengths
                self._lengths = np.where(tokens[:n] == tokens[n], grown + 1, 0).astype(np.int32)
        self._seen = len(tokens)

    def _repeat_limit(self, window: NDArray[np.int32]) -> int:
        """Most tokens of a repetition that count: those after the latest breaker in the window."""
        last = len(window) - 1
        known = window < len(self._is_head)
        heads = np.flatnonzero(known & self._is_head[np.where(known, window, 0)])
        for position in heads[::-1].tolist():
            after = last - position
            longest = -1
            for tail in self._tails[int(window[position])]:
                size = len(tail)
                if longest < size <= after and np.array_equal(window[position + 1 : position + 1 + size], tail):
                    longest = size
            if longest >= 0:
                return after - longest
        return len(window)


def suffix_matches(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Entry i of int32 [n - 1]: longest common suffix of tokens[: i + 1] and tokens (Z-algorithm on the reverse)."""
    reverse = tokens[::-1].tolist()
    n = len(reverse)
    z = [0] * n
    left = right = 0
    for k in range(1, n):
        length = min(right - k, z[k - left]) if k < right else 0
        while k + length < n and reverse[length] == reverse[k + length]:
            length += 1
        z[k] = length
        if k + length > right:
            left, right = k, k + length
    return np.asarray(z[:0:-1], np.int32)
