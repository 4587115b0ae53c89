"""DRY against a direct transcription of its definition, and a worked example."""

from __future__ import annotations

import numpy as np
import pytest

from plait.engine.dry import DryState, suffix_matches
from plait.engine.params import SamplingParams


def direct(tokens: list[int], params: SamplingParams, vocab: int) -> np.ndarray:
    """The penalties by comparing every earlier position token by token."""
    last_n = params.dry_penalty_last_n
    window = tokens if last_n < 0 else tokens[max(len(tokens) - last_n, 0) :]
    n, allowed = len(window), params.dry_allowed_length
    penalties = np.zeros(vocab)
    breakers = params.dry_breaker_token_ids or ()
    limit = n
    for back in range(n):  # tokens from the end; the latest place where a breaker stands, the longest one there
        place = n - 1 - back
        matches = [len(b) - 1 for b in breakers if len(b) - 1 <= back and tuple(window[place : place + len(b)]) == b]
        if matches:
            limit = back - max(matches)
            break
    if n <= allowed or limit < allowed:
        return penalties
    longest: dict[int, int] = {}
    for end in range(n - 1):
        length = 0
        while length <= end and length < limit and window[end - length] == window[n - 1 - length]:
            length += 1
        if length >= allowed:
            longest[window[end + 1]] = max(longest.get(window[end + 1], 0), length)
    for token, length in longest.items():
        if (token,) not in breakers:
            penalties[token] = params.dry_multiplier * params.dry_base ** (length - allowed)
    return penalties


@pytest.mark.parametrize("seed", range(60))
def test_penalties_equal_the_direct_computation_at_every_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 6))
    breakers = [[(0,)], [(0, 1), (1, 1, 0)], []][seed % 3]
    params = SamplingParams(
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=int(rng.integers(0, 4)),
        dry_penalty_last_n=int(rng.choice([-1, 10, 25])),
        dry_breaker_token_ids=breakers,
    )
    state = DryState(params, vocab)
    tokens = rng.integers(0, vocab, 20).tolist()
    for _ in range(40):
        x = np.zeros(vocab, np.float32)
        state.apply(x, np.array(tokens, np.int32))
        assert -x == pytest.approx(direct(tokens, params, vocab), rel=1e-5)
        tokens.append(int(rng.integers(vocab)))


def test_worked_example() -> None:
    # "1 2 3 4 ... 1 2 3": token 4 would prolong a repetition of 3, one beyond the allowed 2: 0.8 * 1.75
    params = SamplingParams(dry_multiplier=0.8, dry_breaker_token_ids=[])
    x = np.zeros(10, np.float32)
    DryState(params, 10).apply(x, np.array([1, 2, 3, 4, 9, 1, 2, 3], np.int32))
    assert np.flatnonzero(x).tolist() == [4]
    assert x[4] == pytest.approx(-0.8 * 1.75)


def test_a_breaker_ends_the_repetition_that_counts() -> None:
    params = SamplingParams(dry_multiplier=0.8, dry_breaker_token_ids=[[2]])
    x = np.zeros(10, np.float32)
    DryState(params, 10).apply(x, np.array([1, 2, 3, 4, 9, 1, 2, 3], np.int32))
    assert not x.any()


def test_a_long_repetition_stays_finite() -> None:
    params = SamplingParams(dry_multiplier=5, dry_base=4, dry_breaker_token_ids=[])
    x = np.zeros(3, np.float32)
    DryState(params, 3).apply(x, np.ones(500, np.int32))
    assert np.isfinite(x).all() and x[1] < -1e30


def test_suffix_matches_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = rng.integers(0, 3, int(rng.integers(1, 30)))
        n = len(tokens)
        expected = [
            max(k for k in range(i + 2) if k == 0 or (tokens[i + 1 - k : i + 1] == tokens[n - k :]).all())
            for i in range(n - 1)
        ]
        assert suffix_matches(tokens.astype(np.int32)).tolist() == expected
