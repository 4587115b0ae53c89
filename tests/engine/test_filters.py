"""Which tokens stay: worked examples, transformers' warpers, and enumeration in float64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from plait.engine import filters
from plait.engine.filters import kth_largest, largest

SIZES = [5, 64, 1000, 49_152]


def distribution(probabilities: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """z and weights."""
    z = np.log(np.array(probabilities, np.float32))
    z -= z.max()
    return z, filters.weights(z)


def kept(positions: np.ndarray | None, size: int) -> list[int]:
    return list(range(size)) if positions is None else positions.tolist()


def test_top_p_example() -> None:
    # mass before: token 0 has 0, token 2 has .5, token 3 has .8
    z, w = distribution([0.50, 0.05, 0.30, 0.15])
    assert kept(filters.top_p(z, w, 0.7), 4) == [0, 2]
    assert w[[0, 2]] / w[[0, 2]].sum() == pytest.approx([0.625, 0.375])


@pytest.mark.parametrize(("p", "count"), [(0.0, 1), (1e-9, 1), (0.25, 1), (0.26, 2), (0.5, 2), (1.0, 4)])
def test_top_p_of_equal_tokens_keeps_the_lowest_ids(p: float, count: int) -> None:
    assert kept(filters.top_p(*distribution([0.25] * 4), p), 4) == list(range(count))


def test_top_k_keeps_ties() -> None:
    x = np.array([1, 2, 2, 2, 3], np.float32)
    assert kept(filters.top_k(x, 3), 5) == [1, 2, 3, 4]
    assert kept(filters.top_k(x, 1), 5) == [4]
    for k in (-1, 0, 5, 55):
        assert filters.top_k(x, k) is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 2, 7, 40, 1000])
def test_kth_largest_and_largest_agree_with_a_full_sort(size: int, k: int) -> None:
    rng = np.random.default_rng(size + k)
    for x in (
        rng.standard_normal(size).astype(np.float32),
        rng.integers(0, 4, size).astype(np.float32),  # many ties
        np.where(rng.random(size) < 0.9, -np.inf, rng.random(size)).astype(np.float32),
    ):
        k = min(k, size)
        assert kth_largest(x, k) == np.sort(x)[size - k]
        assert largest(x, k).tolist() == np.lexsort((np.arange(size), -x))[:k].tolist()


@pytest.mark.parametrize("size", [5, 64, 20_000])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_filters_keep_what_transformers_keeps(size: int, scale: float) -> None:
    torch = pytest.importorskip("torch")
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

    rng = np.random.default_rng(int(size * scale))
    x = (rng.standard_normal(size) * scale).astype(np.float32)
    z = x - x.max()
    w = filters.weights(z)

    def reference(warper: object) -> set[int]:
        return set(torch.isfinite(warper(None, torch.tensor(x)[None].double()))[0].nonzero()[:, 0].tolist())

    def same(got: np.ndarray | None, wanted: set[int]) -> None:
        # fp32 and float64 sums may place a cut one token apart where thousands of tokens are almost equal
        difference = set(kept(got, size)) ^ wanted
        assert len(difference) <= len(wanted) // 1000

    for k in (1, 5, size // 2):
        same(filters.top_k(x, k), reference(TopKLogitsWarper(k)))
    for p in (0.1, 0.5, 0.9, 0.99):
        same(filters.top_p(z, w, p), reference(TopPLogitsWarper(p)))
        same(filters.typical_p(z, w, p), reference(TypicalLogitsWarper(p)))
    for p in (0.01, 0.3, 1.0):
        same(filters.min_p(x, x.max(), 1.0, p), reference(MinPLogitsWarper(p)))


def test_typical_leaves_out_the_most_likely_token_when_it_is_atypical() -> None:
    # entropy of (.4, .15 * 4) is 1.505; -log .4 = .916 is .589 away, -log .15 = 1.897 is .392 away
    z, w = distribution([0.4, 0.15, 0.15, 0.15, 0.15])
    assert kept(filters.typical_p(z, w, 0.5), 5) == [1, 2, 3, 4]
    assert kept(filters.typical_p(z, w, 0.3), 5) == [1, 2]


def test_xtc_keeps_the_least_likely_of_the_top_choices() -> None:
    z, w = distribution([0.4, 0.05, 0.3, 0.2, 0.05])
    assert kept(filters.xtc(z, w, 0.1), 5) == [1, 3, 4]
    assert filters.xtc(z, w, 0.35) is None  # only one token is above
    assert filters.xtc(z, w, 0.6) is None  # above one half it is off


def test_xtc_at_threshold_0_leaves_no_masked_token_as_the_only_choice() -> None:
    z, w = distribution([0.5, 0.3, 0.2])
    z[1], w[1] = -np.inf, 0
    assert kept(filters.xtc(z, w, 0.0), 3) == [1, 2]  # 1 cannot be drawn: it has no weight
    assert filters.draw(w[[1, 2]], 0.0) == 1


@pytest.mark.parametrize("size", [3, 300, 1024, 1025, 5000])
def test_the_draw_inverts_the_cumulative_distribution(size: int) -> None:
    rng = np.random.default_rng(size)
    w = rng.integers(0, 1 << 40, size)
    w[rng.random(size) < 0.3] = 0
    cumulative = np.cumsum(w).tolist()
    for u in [0.0, *rng.random(200).tolist(), 1 - 2**-53]:
        position = filters.draw(w, u)
        assert w[position] > 0
        target = Fraction(u) * cumulative[-1]
        assert (cumulative[position - 1] if position else 0) <= target + 1
        assert target - 1 < cumulative[position]


def test_weights_are_exponentials_in_units_of_2_to_the_minus_40() -> None:
    rng = np.random.default_rng(0)
    z = np.concatenate([-rng.random(100_000) * 40, [0, -28.4, -28.5, -1000, -np.inf]]).astype(np.float32)
    exact = np.exp(z.astype(np.float64)) * 2.0**40
    assert (np.abs(filters.weights(z) - exact) <= 0.5 + exact * 2.0**-22).all()
    assert filters.weights(z)[-5:].tolist() == [1 << 40, 1, 0, 0, 0]
