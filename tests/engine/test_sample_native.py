"""The native sampler and the numpy one choose the same tokens, to the last one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.engine import filters
from plait.engine.executor import StepResult, best_of
from plait.engine.params import SamplingParams
from plait.engine.philox import uniforms
from plait.engine.sampler import NOT_FINITE, NOTHING_LEFT, TOO_LARGE, Sampler, Samples
from plait.engine.sampling_state import NATIVE_SAMPLING, SamplingState, native_sampling
from plait.engine.tokens import TokenBuffer
from plait.kernels import abi, native

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=native.reason())

OFF = SamplingParams()


def states_of(params: list[SamplingParams], seed: int, vocab: int) -> list[SamplingState]:
    return [SamplingState(p, TokenBuffer([1, 2, 3]), 2, seed + i, i % 3, (), vocab) for i, p in enumerate(params)]


def sample(sampler: Sampler, x: np.ndarray, states: list[SamplingState]) -> Samples:
    return sampler.sample(StepResult(*best_of(x, sampler.vocab_size), x), list(range(len(x))), states)


def random_row(rng: np.random.Generator, size: int) -> np.ndarray:
    """Flat, peaked, full of ties, masked, sorted, falling like words do, rounded to bf16; of any size."""
    scale = float(rng.choice([1e-6, 1e-3, 0.1, 1, 3, 8, 100, 1e30]))
    x = rng.standard_normal(size) * scale
    match rng.integers(9):
        case 1:
            x = np.round(x * 2) / 2
        case 2:
            x = rng.integers(0, 3, size) * scale
        case 3:
            x[rng.random(size) < 0.9] = -np.inf
        case 4:
            x[rng.integers(0, size, 5)] += 30 * scale
        case 5:
            x = -np.sort(-x)
        case 6 | 7:
            x = rng.permutation(-np.log(np.arange(1, size + 1)) * rng.uniform(0.5, 2))
    x = x.astype(np.float32)
    if rng.random() < 0.1:
        x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if not np.isfinite(x.max()):
        x[rng.integers(0, size)] = 1
    if rng.random() < 0.02:
        x[rng.integers(0, size)] = rng.choice([np.nan, np.inf])
    if rng.random() < 0.01:
        x[:] = -np.inf
    return x


def random_params(rng: np.random.Generator, size: int) -> SamplingParams:
    def sometimes(chance: float, values: list[float], off: float) -> float:
        return float(rng.choice(values)) if rng.random() < chance else off

    return SamplingParams(
        temperature=float(rng.choice([0, 1e-4, 0.01, 0.3, 0.7, 1, 1, 2.5, 100])),
        min_p=sometimes(0.3, [1e-9, 1e-4, 0.05, 0.1, 0.9, 1.0], 0),
        top_k=int(sometimes(0.4, [1, 2, 40, 1000, max(size // 2, 1), size, 2**31], float(rng.choice([0, -1])))),
        typical_p=sometimes(0.3, [1e-12, 0.1, 0.5, 0.9, 0.999], 1),
        top_p=sometimes(0.5, [0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12], 1),
        xtc_probability=sometimes(0.3, [0.5, 1], 0),
        xtc_threshold=float(rng.choice([0, 0.01, 0.1, 0.3, 0.5, 0.6])),
    )


def compare(rng: np.random.Generator, size: int, rows: int) -> None:
    x = np.stack([random_row(rng, size) for _ in range(rows)])
    states = states_of([random_params(rng, size) for _ in range(rows)], int(rng.integers(1 << 62)), size)
    before = x.copy()
    got, expected = (sample(Sampler(size, use_native), x, states) for use_native in (True, False))
    assert np.array_equal(x, before, equal_nan=True)
    for i, state in enumerate(states):
        assert got.token_ids[i] == expected.token_ids[i], (size, state.params)
    assert got.errors == expected.errors


@pytest.mark.parametrize("size", [1, 2, 7, 64, 65, 300, 511, 1000, 5000])
def test_native_and_numpy_choose_the_same_tokens(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(6):
        compare(rng, size, 8)


def test_native_and_numpy_choose_the_same_tokens_of_a_large_vocabulary() -> None:
    compare(np.random.default_rng(3), 49_152, 6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_native_and_numpy_choose_the_same_tokens_of_many_rows(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(500):
        compare(rng, int(rng.integers(1, 3000)), 16)
    for _ in range(10):
        compare(rng, int(rng.choice([49_152, 128_256, 262_144])) - int(rng.integers(9)), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (OFF, [0.5, 0.3, 0.2]),
        (replace(OFF, temperature=0.5), [25 / 38, 9 / 38, 4 / 38]),
        (replace(OFF, top_p=0.6), [0.625, 0.375, 0]),
        (replace(OFF, min_p=0.5, top_p=0.6), [1, 0, 0]),
        (replace(OFF, top_k=2), [0.625, 0.375, 0]),
        (replace(OFF, xtc_probability=1.0, xtc_threshold=0.25), [0, 0.6, 0.4]),
    ],
)
def test_native_draws_follow_the_filtered_distribution(params: SamplingParams, expected: list[float]) -> None:
    rows = 20_000
    x = np.tile(np.log(np.array([0.5, 0.3, 0.2], np.float32)), (rows, 1))
    tokens = sample(Sampler(3), x, states_of([params] * rows, 7, 3)).token_ids
    assert np.bincount(tokens, minlength=3) / rows == pytest.approx(expected, abs=0.015)
    assert (np.bincount(tokens, minlength=3) > 0).tolist() == [p > 0 for p in expected]


def test_the_library_draws_philox_as_python_does() -> None:
    """With all weights equal the token says where u lies, to 1 part in the vocabulary."""
    vocab, rows = 4096, 64
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 1 << 64, rows, dtype=np.uint64).tolist()
    choices, positions = rng.integers(0, 128, rows).tolist(), rng.integers(0, 1 << 32, rows).tolist()
    params = np.frombuffer(
        b"".join(native_sampling(OFF, s, c) for s, c in zip(seeds, choices, strict=True)), NATIVE_SAMPLING
    ).copy()
    params["position"] = positions
    ids = np.empty(rows, np.int32)
    x = np.zeros((rows, vocab), np.float32)
    library = native.native_library()
    assert library is not None
    assert library.functions.plait_sample(x.ctypes.data, vocab, rows, vocab, params.ctypes.data, ids.ctypes.data) == 0
    assert ids.tolist() == np.floor(uniforms(seeds, choices, positions)[:, 0] * vocab).astype(int).tolist()


def test_weights_are_numpys_to_the_last_unit() -> None:
    """Of two tokens the draw tells where the first one's weight ends."""
    rng = np.random.default_rng(2)
    rows = 4000
    z = -(rng.random(rows) * 29).astype(np.float32)
    first, second = 1 << 40, filters.weights(z)
    z, second = z[second > 0], second[second > 0]
    x = np.stack([np.zeros_like(z), z], axis=1)
    params = np.frombuffer(native_sampling(OFF, 1, 0) * len(z), NATIVE_SAMPLING).copy()
    params["seeded"] = 0
    library = native.native_library()
    assert library is not None
    for step, expected in ((-0.5, 0), (0.5, 1)):
        params["u"] = (first + step) / (first + second)
        ids = np.full(len(z), -7, np.int32)
        library.functions.plait_sample(x.ctypes.data, 2, len(z), 2, params.ctypes.data, ids.ctypes.data)
        assert (ids == expected).all()


def test_the_struct_is_the_librarys() -> None:
    assert np.dtype(abi.Sampling) == NATIVE_SAMPLING


def test_rows_that_nobody_asks_about_are_left_alone() -> None:
    params = np.frombuffer(native_sampling(OFF, 1, 0) * 3, NATIVE_SAMPLING).copy()
    params["temperature"][1] = -1
    ids = np.full(3, -7, np.int32)
    x = np.zeros((3, 8), np.float32)
    library = native.native_library()
    assert library is not None
    library.functions.plait_sample(x.ctypes.data, 8, 3, 8, params.ctypes.data, ids.ctypes.data)
    assert ids[1] == -7 and ids[0] >= 0 and ids[2] >= 0


def test_errors_are_those_of_the_numpy_sampler() -> None:
    x = np.zeros((5, 8), np.float32)
    x[0, 3], x[1, 3], x[4, 1] = np.nan, np.inf, 3e37
    params = [
        OFF,
        OFF,
        SamplingParams(allowed_token_ids=[1], logit_bias={1: -100}),
        OFF,
        SamplingParams(repetition_penalty=0.01),
    ]
    states = states_of(params, 1, 8)
    for use_native in (True, False):
        errors = sample(Sampler(8, use_native), x, states).errors
        assert errors == {0: NOT_FINITE, 1: NOT_FINITE, 2: NOTHING_LEFT, 4: TOO_LARGE}


def test_adjusted_repeated_and_skipped_rows_meet_their_states() -> None:
    """A step in which some rows are greedy, some adjusted, and two choices draw from one row."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((6, 500)) * 3).astype(np.float32)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.9),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(min_p=0.01, logprobs=2),
        SamplingParams(temperature=0, logit_bias={3: 50}),
    ]
    params = [kinds[i % 5] for i in range(24)]
    states, rows = states_of(params, 9, 500), sorted(rng.integers(1, 6, 24).tolist())
    result = StepResult(*best_of(x, 500), x)
    got, expected = (Sampler(500, use_native).sample(result, rows, states) for use_native in (True, False))
    assert got == expected
