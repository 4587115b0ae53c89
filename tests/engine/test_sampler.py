"""One token per row: order of the steps, greedy rules, penalties, masks, log-probabilities, draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plait.engine.executor import StepResult, best_of
from plait.engine.params import SamplingParams
from plait.engine.sampler import NOT_FINITE, NOTHING_LEFT, Sampler, Samples
from plait.engine.sampling_state import SamplingState
from plait.engine.tokens import TokenBuffer


def state_of(
    params: SamplingParams,
    prompt: list[int] = (),
    output: list[int] = (),
    vocab: int = 8,
    ends: tuple = (),
    seed: int = 1,
) -> SamplingState:
    tokens = TokenBuffer([*prompt, *output])
    return SamplingState(params, tokens, len(prompt), seed, 0, ends, vocab)


def sample(sampler: Sampler, x: np.ndarray, states: list[SamplingState]) -> Samples:
    """Row r of logits [R, columns] for states[r]."""
    result = StepResult(*best_of(x, sampler.vocab_size), x)
    return sampler.sample(result, list(range(len(x))), states)


def pick(logits: list[float], params: SamplingParams, **kwargs: object) -> int:
    x = np.array([logits], np.float32)
    samples = sample(Sampler(x.shape[1]), x, [state_of(params, vocab=x.shape[1], **kwargs)])
    assert not samples.errors
    return samples.token_ids[0]


def drawn(logits: list[float], count: int = 400, **params: object) -> set[int]:
    x = np.array([logits], np.float32)
    sampler, p = Sampler(x.shape[1]), SamplingParams(**params)
    return {sample(sampler, x, [state_of(p, vocab=x.shape[1], seed=s)]).token_ids[0] for s in range(count)}


def adjusted(x: list[float], params: SamplingParams, **kwargs: object) -> list[float]:
    row = np.array(x, np.float32)
    state_of(params, vocab=len(row), **kwargs).adjust(row)
    return row.tolist()


# Greedy


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert pick([0, 2, 1, 2], SamplingParams(temperature=0)) == 1


@pytest.mark.parametrize("temperature", [1e-5, 1e-12, 1e-38, 5e-324])
def test_a_tiny_temperature_equals_greedy_even_with_a_ban(temperature: float) -> None:
    assert pick([0, 2, 1, 2], SamplingParams(temperature=temperature, logit_bias={1: -100}, seed=3)) == 3


def test_a_small_temperature_stays_finite() -> None:
    assert drawn([-1e30, 5.0, 4.9], temperature=2e-4) == {1}


def test_k_1_is_greedy_and_a_huge_temperature_is_nearly_uniform() -> None:
    assert drawn([0, 2, 1], top_k=1) == {1}
    assert drawn([0, 2, 1], temperature=100) == {0, 1, 2}


# Order of the filters


def test_min_p_comes_before_top_p() -> None:
    # min_p .5 leaves .5 and .3, renormalised .625 and .375: the first alone reaches .6
    x = np.log([0.5, 0.3, 0.2]).tolist()
    assert drawn(x, min_p=0.5, top_p=0.6) == {0}
    assert drawn(x, top_p=0.6) == {0, 1}


def test_temperature_comes_before_the_filters() -> None:
    x = np.log([0.5, 0.3, 0.2]).tolist()
    # squared and renormalised: .658, .237, .105
    assert drawn(x, temperature=0.5, top_p=0.65) == {0}
    assert drawn(x, temperature=0.5, min_p=0.3) == {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_all_filters_together_leave_what_enumeration_in_float64_leaves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(12) * 2
    options = {
        "temperature": rng.uniform(0.5, 2),
        "min_p": rng.choice([0, 0.05, 0.2]),
        "top_k": int(rng.choice([0, 3, 6])),
        "typical_p": rng.choice([1.0, 0.7]),
        "top_p": rng.choice([1.0, 0.6, 0.9]),
    }
    p = np.exp((x - x.max()) / options["temperature"])
    alive = p >= options["min_p"] * p.max()
    if options["top_k"]:
        alive &= x >= np.sort(np.where(alive, x, -np.inf))[-options["top_k"]]
    if options["typical_p"] < 1:
        q = np.where(alive, p, 0) / p[alive].sum()
        surprise = np.where(alive, -np.log(np.where(alive, q, 1)), np.inf)
        order = np.argsort(np.abs(surprise - (q[alive] * surprise[alive]).sum()))
        alive[order[np.cumsum(q[order]) - q[order] >= options["typical_p"]]] = False
    if options["top_p"] < 1:
        q = np.where(alive, p, 0) / p[alive].sum()
        order = np.argsort(-q)
        alive[order[np.cumsum(q[order]) - q[order] >= options["top_p"]]] = False
    likely = np.flatnonzero(alive & (p / p[alive].sum() > 0.03))
    got = drawn(x.tolist(), **options)
    assert set(likely.tolist()) <= got <= set(np.flatnonzero(alive).tolist())


def test_xtc_always_on_never_draws_the_best_of_several_top_choices() -> None:
    x = np.log([0.4, 0.3, 0.25, 0.05]).tolist()
    assert drawn(x, xtc_probability=1.0, xtc_threshold=0.2) == {2, 3}
    assert drawn(x, xtc_probability=0.5, xtc_threshold=0.2) == {0, 1, 2, 3}


# Draws


def test_frequencies_follow_the_distribution() -> None:
    probabilities = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    rows, steps = 50, 200
    x = np.tile(np.log(probabilities).astype(np.float32), (rows, 1))
    states = [SamplingState(SamplingParams(), TokenBuffer([]), 0, 42 + r, 0, (), 5) for r in range(rows)]
    sampler, n = Sampler(5), rows * steps
    counts = np.zeros(5)
    for _ in range(steps):
        for state, token in zip(states, sample(sampler, x, states).token_ids, strict=True):
            counts[token] += 1
            state.tokens.append(token)
    chi_square = ((counts - n * probabilities) ** 2 / (n * probabilities)).sum()
    assert chi_square < 18.47  # 99.9% quantile with 4 degrees of freedom


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    rng = np.random.default_rng(0)
    vocab = 3000
    x = (rng.standard_normal((6, vocab)) * 3).astype(np.float32)
    kinds = [
        {"temperature": 0},
        {"top_p": 0.9},
        {"top_k": 7, "logprobs": 3},
        {"repetition_penalty": 2.0},
        {"temperature": 0, "logprobs": 2},
        {"min_p": 0.1, "typical_p": 0.8},
    ]
    states = [
        state_of(SamplingParams(**k), prompt=[5, 6], output=[int(i)], vocab=vocab, seed=i) for i, k in enumerate(kinds)
    ]
    before = x.copy()
    together = sample(Sampler(vocab), x, states)
    assert np.array_equal(x, before)
    for order in (range(6), range(5, -1, -1)):
        for i in order:
            alone = sample(Sampler(vocab), x[i : i + 1], [states[i]])
            assert (alone.token_ids[0], alone.logprobs.get(0)) == (together.token_ids[i], together.logprobs.get(i))


def test_rows_of_the_embedding_beyond_the_tokenizer_are_never_sampled() -> None:
    x = np.array([[0, 1, 0, 50, 60]], np.float32)
    sampler = Sampler(3)
    for params in (SamplingParams(temperature=0), SamplingParams(logprobs=5), SamplingParams(presence_penalty=1)):
        samples = sample(sampler, x, [state_of(params, prompt=[4], vocab=3)])
        assert samples.token_ids[0] < 3
        if samples.logprobs:
            assert [t for t, _ in samples.logprobs[0].top] == [1, 0, 2]


# Bias, masks, penalties


def test_minus_100_bans_and_100_forces() -> None:
    assert pick([500, 0, 0], SamplingParams(temperature=0, logit_bias={0: -100})) == 1
    assert drawn([500, 0, 0], temperature=50, logit_bias={2: 100}) == {2}
    assert adjusted([1, 2, 3], SamplingParams(logit_bias={1: 2.5})) == [1, 4.5, 3]


def test_only_allowed_ids_are_sampled() -> None:
    assert drawn([9, 0, 0, 9], allowed_token_ids=[1, 2]) == {1, 2}


def test_min_tokens_masks_every_end_and_stop_id_of_the_output_only() -> None:
    params = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=[3])
    x = [0, 5, 9, 8, 1]
    for produced in range(7):
        got = pick(x, params, prompt=[1] * 50, output=[0] * produced, ends=(2, 3))
        assert got == (1 if produced < 5 else 2)
    assert adjusted(x, params, ends=(2, 3)) == [0, 5, -math.inf, -math.inf, 1]


def test_bad_words_are_not_completed() -> None:
    params = SamplingParams(temperature=0, bad_words_token_ids=[[1, 2], [4]])
    x = [0.0, 1, 5, 2, 9]
    assert adjusted(x, params, prompt=[0], output=[1]) == [0, 1, -math.inf, 2, -math.inf]
    assert adjusted(x, params, prompt=[0], output=[3]) == [0, 1, 5, 2, -math.inf]
    assert adjusted(x, params, prompt=[1], output=[]) == [0, 1, 5, 2, -math.inf]  # only the output counts


def test_repetition_counts_prompt_and_output_presence_and_frequency_only_output() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    # token 0: prompt only; 1: prompt and twice in the output; 2: once in the output; 3: nowhere
    got = adjusted([4, 4, -4, 4], params, prompt=[0, 1, 0], output=[1, 2, 1])
    assert got == [2, 2 - 0.5 - 2 * 0.25, -8 - 0.5 - 0.25, 4]


def test_repetition_penalty_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(3)
    x = rng.standard_normal(100).astype(np.float32) * 4
    prompt, output = rng.integers(0, 100, 30).tolist(), rng.integers(0, 100, 20).tolist()
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), torch.tensor(x)[None])[0]
    got = adjusted(x.tolist(), SamplingParams(repetition_penalty=1.3), prompt=prompt, output=output)
    assert got == pytest.approx(expected.tolist(), rel=1e-6)


def test_counts_that_grow_token_by_token_equal_a_recount() -> None:
    rng = np.random.default_rng(5)
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    prompt = rng.integers(0, 300, 20).tolist()
    tokens = TokenBuffer(prompt)
    state = SamplingState(params, tokens, len(prompt), 1, 0, (), 300)
    x = rng.standard_normal(300).astype(np.float32)
    for token in rng.integers(0, 300, 400).tolist():
        tokens.append(token)
        state.observe(token)
    row = x.copy()
    state.adjust(row)
    assert row.tolist() == adjusted(x.tolist(), params, prompt=prompt, output=tokens.array[20:].tolist())


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_logprobs_are_of_the_raw_distribution(temperature: float, count: int) -> None:
    rng = np.random.default_rng(count)
    x = (rng.standard_normal((1, 50)) * 2).astype(np.float32)
    params = SamplingParams(
        temperature=temperature, logprobs=count, presence_penalty=2, logit_bias={int(x.argmax()): -100}
    )
    samples = sample(Sampler(50), x, [state_of(params, prompt=[1], output=[2, 3], vocab=50)])
    expected = x[0].astype(np.float64) - np.log(np.exp(x[0].astype(np.float64)).sum())
    order = np.argsort(-expected)
    entry, (token,) = samples.logprobs[0], samples.token_ids
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
    assert entry.rank == 1 + order.tolist().index(token)
    assert [t for t, _ in entry.top] == order[:count].tolist()
    assert [v for _, v in entry.top] == pytest.approx(expected[order[:count]].tolist(), abs=1e-5)


def test_equal_logits_rank_by_id() -> None:
    x = np.array([2, 3, 3, 2], np.float32)
    sampler = Sampler(4)
    assert [sampler.logprobs(x, i, 4).rank for i in range(4)] == [3, 1, 2, 4]
    assert [t for t, _ in sampler.logprobs(x, 0, 4).top] == [1, 2, 0, 3]


# Faults


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=1)])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: SamplingParams) -> None:
    x = np.zeros((3, 8), np.float32)
    x[1, 4] = bad
    x[:, 2] = 30
    samples = sample(Sampler(8), x, [state_of(params)] * 3)
    assert samples.errors == {1: NOT_FINITE}
    assert samples.token_ids == [2, -1, 2]


def test_masks_that_leave_nothing_are_an_error_of_the_row() -> None:
    params = SamplingParams(allowed_token_ids=[1], logit_bias={1: -100})
    assert sample(Sampler(8), np.zeros((1, 8), np.float32), [state_of(params)]).errors == {0: NOTHING_LEFT}
