"""Choosing experts, on every instruction set that this machine runs, against a brute-force choice in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import exp

import numpy as np
import pytest

from plait.kernels import abi, native
from plait.ops.spec import RouterSpec
from tests.kernels.quant_model import isa_names
from tests.routers import BY_HAND

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
every_isa = pytest.mark.parametrize("isa", isa_names())


@dataclass
class Choice:
    ids: np.ndarray  # int32 [rows, k]
    weights: np.ndarray  # float32 [rows, k]


def call(isa: str, spec: RouterSpec, logits: np.ndarray, bias: np.ndarray | None = None) -> tuple[int, Choice]:
    library = native.native_library()
    assert library is not None
    flags = abi.ROUTE_TWO_BEST * (spec.group_score == "two_best") + abi.ROUTE_MASKED_ZERO * (spec.masked == "zero")
    op = abi.Op(abi.OP_KINDS["route"])
    scores = abi.ROUTER_SCORES[spec.scores]
    op.i[:] = (spec.num_experts, spec.top_k, scores, int(spec.renormalises), spec.groups, spec.top_groups, flags)
    op.f[:3] = (spec.scale, spec.jitter, spec.least_sum)
    rows = max(len(logits), 1)
    made = Choice(
        np.full((rows, max(spec.top_k, 1)), -7, np.int32), np.full((rows, max(spec.top_k, 1)), -7, np.float32)
    )
    weights = (ctypes.POINTER(abi.Matrix) * 6)()
    if bias is not None:
        weights[0] = ctypes.pointer(abi.Matrix(abi.LAYOUT_VECTOR, 0, 1, bias.size, 0, bias.ctypes.data))
    status = library.functions.plait_row_op(
        isa.encode(),
        ctypes.byref(op),
        (ctypes.c_void_p * 3)(logits.ctypes.data),
        (ctypes.c_void_p * 3)(made.ids.ctypes.data, made.weights.ctypes.data),
        weights,
        None,
        len(logits),
    )
    return status, made


def route(isa: str, spec: RouterSpec, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
    status, made = call(isa, spec, logits, bias)
    assert status == 0, native.native_library().functions.plait_last_error()
    return made


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the largest, the lower index first among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def brute_force(spec: RouterSpec, logits: list[float], bias: list[float]) -> tuple[list[int], list[float]]:
    """One row, number by number."""
    if spec.scores == "sparse_mixer":
        return sparse_mixer(spec, logits)
    if spec.scores == "softmax":
        total = sum(exp(x) for x in logits)
        scores = [exp(x) / total for x in logits]
    elif spec.scores == "sigmoid":
        scores = [1 / (1 + exp(-x)) for x in logits]
    else:
        scores = list(logits)
    selection = [s + b for s, b in zip(scores, bias, strict=True)]
    if spec.groups:
        size = spec.num_experts // spec.groups
        parts = [selection[g * size : (g + 1) * size] for g in range(spec.groups)]
        count = 2 if spec.group_score == "two_best" else 1
        eligible = best([sum(sorted(part)[-count:]) for part in parts], spec.top_groups)
        for e in range(spec.num_experts):
            if e // size not in eligible:
                selection[e] = 0.0 if spec.masked == "zero" else -np.inf
                scores[e] = 0.0 if spec.masked == "zero" else scores[e]
    ids = best(selection, spec.top_k)
    weights = [scores[e] for e in ids]
    if spec.scores == "topk_softmax":
        total = sum(exp(w) for w in weights)
        weights = [exp(w) / total for w in weights]
    if spec.renormalises:
        total = max(sum(weights) + 1e-20, spec.least_sum)
        weights = [w / total for w in weights]
    return ids, [w * spec.scale for w in weights]


def sparse_mixer(spec: RouterSpec, logits: list[float]) -> tuple[list[int], list[float]]:
    """The best, and the best of the others: each shares with those that come close to it."""
    left, ids, weights = list(range(len(logits))), [], []
    for _ in range(2):
        (at,) = (left[i] for i in best([logits[e] for e in left], 1))
        top = logits[at]
        size = [max(abs(logits[e]), top) for e in left]
        near = [e for e, d in zip(left, size, strict=True) if d == 0 or (top - logits[e]) / d <= 2 * spec.jitter]
        weights.append(spec.scale / sum(exp(logits[e] - top) for e in near))
        ids.append(at)
        left.remove(at)
    return ids, weights


def agree(isa: str, spec: RouterSpec, logits: np.ndarray, bias: np.ndarray | None = None) -> None:
    made = route(isa, spec, logits, bias)
    for r, row in enumerate(logits):
        given = [0.0] * spec.num_experts if bias is None else bias.astype(float).tolist()
        ids, weights = brute_force(spec, row.astype(float).tolist(), given)
        assert made.ids[r].tolist() == ids
        np.testing.assert_allclose(made.weights[r], weights, rtol=2e-6, atol=1e-7)


def coarse(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers with many ties, apart from which fp32 tells what float64 tells."""
    return (rng.integers(-20, 21, shape) / 8).astype(np.float32)


ROUTERS = [
    RouterSpec(8, 2, "topk_softmax"),
    RouterSpec(128, 8, "softmax", "always"),
    RouterSpec(60, 4, "softmax", "never", 2.5),
    RouterSpec(64, 1, "softmax", "several"),
    RouterSpec(33, 33, "sigmoid", "several", 0.5),
    RouterSpec(64, 6, "softmax", "never", 16.0, 8, 3, "best", "zero"),
    RouterSpec(256, 8, "sigmoid", "always", 2.5, 8, 4, "two_best", "zero"),
    RouterSpec(96, 4, "sigmoid", "always", 1.0, 4, 2, "two_best", "minus_infinity"),
    RouterSpec(1, 1, "sigmoid"),
    RouterSpec(1024, 8, "softmax", "always"),
    RouterSpec(64, 6, "softmax", "always", least_sum=0.4),
]
# Binary fractions, so that no logit lies at the border of what is close by rounding alone.
MIXERS = [
    RouterSpec(16, 2, "sparse_mixer", jitter=0.01),
    RouterSpec(9, 2, "sparse_mixer", jitter=0.17, scale=2.5),
    RouterSpec(40, 2, "sparse_mixer", jitter=0.55),
    RouterSpec(2, 2, "sparse_mixer", jitter=0.3),
    RouterSpec(33, 2, "sparse_mixer", jitter=0.0),
]


@every_isa
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spec", ROUTERS, ids=[f"{s.num_experts}-{s.top_k}-{s.scores}-{s.groups}" for s in ROUTERS])
def test_routers_of_models(isa: str, spec: RouterSpec, biased: bool) -> None:
    rng = np.random.default_rng(spec.num_experts)
    bias = coarse(rng, spec.num_experts) / 16 if biased else None
    agree(isa, spec, coarse(rng, 7, spec.num_experts), bias)


@every_isa
@pytest.mark.parametrize("spec", MIXERS, ids=lambda s: f"{s.num_experts}-{s.jitter}")
def test_sparse_mixers(isa: str, spec: RouterSpec) -> None:
    rng = np.random.default_rng(spec.num_experts)
    logits = coarse(rng, 40, spec.num_experts)
    logits[0] = -1.5  # equal ones: the first two, and shares of all that are left
    logits[1] = np.minimum(logits[1], 0)
    agree(isa, spec, logits)


@every_isa
@pytest.mark.parametrize("name", BY_HAND)
def test_weights_that_are_worked_out_by_hand(isa: str, name: str) -> None:
    scores, bias, spec, chosen, shares = BY_HAND[name]
    made = route(isa, spec, np.float32([scores]), None if bias is None else np.float32(bias))
    assert made.ids[0].tolist() == chosen
    assert made.weights[0].tolist() == pytest.approx(shares, abs=2e-6 * spec.scale)


@every_isa
@pytest.mark.parametrize("shift", [-30.0, -3.0])
def test_selection_scores_below_zero_choose_from_kept_groups(isa: str, shift: float) -> None:
    spec = RouterSpec(8, 2, "sigmoid", "always", 2.5, 4, 2, "two_best", "minus_infinity")
    rng = np.random.default_rng(3)
    agree(isa, spec, coarse(rng, 60, 8), (shift + coarse(rng, 8) / 4).astype(np.float32))


@every_isa
@pytest.mark.parametrize("seed", range(60))
def test_random_routers(isa: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(0, 9))
    size = int(rng.integers(1, 9)) if groups else int(rng.integers(1, 65))
    experts = max(groups, 1) * size
    top_groups = int(rng.integers(1, groups + 1)) if groups else 0
    most = top_groups * size if groups else experts
    spec = RouterSpec(
        experts,
        int(rng.integers(1, min(8, most) + 1)),
        ("softmax", "sigmoid", "topk_softmax")[rng.integers(3)],
        ("never", "always", "several")[rng.integers(3)],
        float(rng.choice([1.0, 2.5])),
        groups,
        top_groups,
        "two_best" if size > 1 and rng.integers(2) else "best",
        "zero" if rng.integers(2) else "minus_infinity",
    )
    agree(isa, spec, coarse(rng, 5, experts), coarse(rng, experts) / 16 if rng.integers(2) else None)


@every_isa
def test_equal_logits_choose_the_first_in_order(isa: str) -> None:
    made = route(isa, RouterSpec(37, 5, "softmax"), np.zeros((2, 37), np.float32))
    assert made.ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert np.allclose(made.weights, 1 / 37)
    zeros = np.array([[-0.0, 0.0, -0.0, -1.0]], np.float32)  # one number, whatever its sign
    assert route(isa, RouterSpec(4, 3, "topk_softmax"), zeros).ids.tolist() == [[0, 1, 2]]


@every_isa
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("at", [0, 9, 18])
def test_a_nan_reaches_every_weight_and_no_id_is_out_of_range(isa: str, scores: str, at: int) -> None:
    logits = np.linspace(-1, 1, 2 * 19, dtype=np.float32).reshape(2, 19)
    logits[0, at] = np.nan
    made = route(isa, RouterSpec(19, 4, scores, "always", groups=0), logits)
    assert np.isnan(made.weights[0]).all() and np.isfinite(made.weights[1]).all()
    assert len(set(made.ids[0].tolist())) == 4 and ((made.ids >= 0) & (made.ids < 19)).all()
    bias = np.zeros(19, np.float32)
    bias[at] = np.nan
    assert np.isnan(route(isa, RouterSpec(19, 4, scores), np.zeros((1, 19), np.float32), bias).weights).all()


@every_isa
def test_a_nan_in_a_sparse_mixer_reaches_both_weights_and_a_bias_is_refused(isa: str) -> None:
    logits = np.linspace(-1, 1, 2 * 19, dtype=np.float32).reshape(2, 19)
    logits[0, 4] = np.nan
    spec = RouterSpec(19, 2, "sparse_mixer", jitter=0.1)
    made = route(isa, spec, logits)
    assert np.isnan(made.weights[0]).all() and np.isfinite(made.weights[1]).all()
    status, _ = call(isa, spec, logits, np.zeros(19, np.float32))
    assert status == -1 and "bias" in native.native_library().functions.plait_last_error().decode()


@every_isa
@pytest.mark.parametrize("value", [np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("spec", ROUTERS[:8], ids=lambda s: f"{s.num_experts}-{s.scores}-{s.groups}")
def test_extreme_logits_choose_different_experts_in_range(isa: str, spec: RouterSpec, value: float) -> None:
    rng = np.random.default_rng(1)
    logits = coarse(rng, 4, spec.num_experts)
    logits[0, 0] = value
    logits[1] = value
    logits[2, ::2] = value
    made = route(isa, spec, logits)
    assert all(len(set(ids)) == spec.top_k for ids in made.ids.tolist())
    assert ((made.ids >= 0) & (made.ids < spec.num_experts)).all()
    assert np.isfinite(made.weights[3]).all()


@every_isa
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (RouterSpec(1025, 2), "out of range"),
        (RouterSpec(0, 1), "out of range"),
        (RouterSpec(8, 9), "not as many"),
        (RouterSpec(8, 0), "not as many"),
        (RouterSpec(8, 3, "sparse_mixer"), "takes two"),
        (RouterSpec(8, 2, "sparse_mixer", groups=4, top_groups=2), "takes two"),
        (RouterSpec(8, 2, groups=3, top_groups=1), "do not divide"),
        (RouterSpec(8, 2, groups=4, top_groups=5), "not as many groups"),
        (RouterSpec(8, 2, groups=8, top_groups=4, group_score="two_best"), "no two best"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(isa: str, spec: RouterSpec, words: str) -> None:
    status, _ = call(isa, spec, np.zeros((1, 2000), np.float32))
    assert status == -1
    assert words in native.native_library().functions.plait_last_error().decode()
