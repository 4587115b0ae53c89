"""The torch filters: worked numbers, enumeration in float64, transformers' warpers, and the host sampler's filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.decoding import filters
from plait.decoding.filters import Filters, row_generators, sample
from plait.engine import filters as host
from plait.engine.params import GREEDY_TEMPERATURE, SamplingParams
from plait.engine.sampler import _Left
from plait.errors import EngineError, RequestError


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def kept(logits: torch.Tensor) -> list[int]:
    """Ids that a row [1, V] has left."""
    return torch.isfinite(logits)[0].nonzero().squeeze(-1).tolist()


# Worked numbers


def test_top_p_drops_by_the_mass_before_and_renormalises() -> None:
    # Mass before: token 0 has 0, token 2 has .5 (< .7), token 3 has .8, token 1 has .95.
    left = filters.top_p(logits_of([0.50, 0.05, 0.30, 0.15]), 0.7)
    assert kept(left) == [0, 2]
    assert left.softmax(-1)[0].tolist() == pytest.approx([0.625, 0, 0.375, 0])


@pytest.mark.parametrize(("p", "count"), [(0.0, 1), (1e-9, 1), (0.25, 1), (0.26, 2), (0.5, 2), (1.0, 4), (1.5, 4)])
def test_top_p_of_equal_tokens_keeps_the_lowest_ids(p: float, count: int) -> None:
    assert kept(filters.top_p(torch.zeros(1, 4), p)) == list(range(count))


def test_top_p_of_1_keeps_what_fp32_sums_would_drop() -> None:
    x = torch.zeros(1, 49_152)
    x[0, 0] = 20.0
    assert len(kept(filters.top_p(x, 1.0))) == 49_152


@pytest.mark.parametrize(
    ("k", "ids"), [(3, [1, 2, 3, 4]), (1, [4]), (-1, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4]), (55, [0, 1, 2, 3, 4])]
)
def test_top_k_keeps_ties(k: int, ids: list[int]) -> None:
    assert kept(filters.top_k(torch.tensor([[1.0, 2, 2, 2, 3]]), k)) == ids


def test_top_k_of_1_keeps_two_equal_ones() -> None:
    assert kept(filters.top_k(torch.tensor([[3.0, 2, 3]]), 1)) == [0, 2]


def test_min_p_is_a_share_of_the_most_likely() -> None:
    x = logits_of([0.5, 0.24, 0.26])
    assert kept(filters.min_p(x, 0.5)) == [0, 2]
    assert kept(filters.min_p(x, 1.0)) == [0]
    assert kept(filters.min_p(x, 0.0)) == [0, 1, 2]


def test_typical_leaves_out_the_most_likely_token_when_it_is_atypical() -> None:
    # entropy of (.4, .15 * 4) is 1.505; -log .4 = .916 is .589 away, -log .15 = 1.897 is .392 away
    x = logits_of([0.4, 0.15, 0.15, 0.15, 0.15])
    assert kept(filters.typical_p(x, 0.5)) == [1, 2, 3, 4]
    assert kept(filters.typical_p(x, 0.29)) == [1, 2]


def test_min_p_comes_before_top_p() -> None:
    # min_p .5 leaves .5 and .3, renormalised .625 and .375: the first alone reaches .6
    assert kept(Filters(min_p=0.5, top_p=0.6)(logits_of([0.5, 0.3, 0.2]))) == [0]


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-38, 1e-5])
def test_no_temperature_is_greedy_with_ties_to_the_lowest_id(value: float) -> None:
    x = torch.tensor([[1.0, 3, 2, 3]])
    assert kept(filters.temperature(x, value)) == [1]
    assert sample(x, Filters(temperature=value)).tolist() == [1]


def test_small_temperatures_stay_finite() -> None:
    scaled = filters.temperature(torch.tensor([[-1e30, 5.0, 4.9]]), 2e-4)
    assert not scaled.isnan().any() and scaled.softmax(-1)[0].tolist() == [0, 1, 0]


def test_temperature_divides() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5]])
    expected = (x.double() / 0.7).softmax(-1)
    assert torch.allclose(filters.temperature(x, 0.7).softmax(-1).double(), expected, atol=1e-7)


# Against others


@pytest.mark.parametrize("size", [5, 64, 3000])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_filters_keep_what_transformers_keeps(size: int, scale: float) -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

    x = torch.randn(3, size, generator=torch.Generator().manual_seed(size)) * scale

    def same(ours: torch.Tensor, warper: object) -> None:
        theirs = torch.isfinite(warper(None, x.double()))
        assert torch.equal(torch.isfinite(ours), theirs)

    for k in (1, 5, size // 2):
        same(filters.top_k(x, k), TopKLogitsWarper(k))
    for p in (0.1, 0.5, 0.9):
        same(filters.top_p(x, p), TopPLogitsWarper(p))
        same(filters.typical_p(x, p), TypicalLogitsWarper(p))
    for p in (0.01, 0.3, 1.0):
        same(filters.min_p(x, p), MinPLogitsWarper(p))


# The host's weights end at e^-28.4 of the largest: what is less likely is not drawn there.
_LOWEST = -28.0


def host_survivors(x: np.ndarray, f: Filters) -> list[int]:
    """The host sampler's filters on one row, in the host sampler's order."""
    highest = x.max()
    left = _Left(x)
    left.keep(host.min_p(x, highest, f.temperature, f.min_p))
    left.keep(host.top_k(left.z, f.top_k))
    left.z = (left.z - highest) * np.float32(1 / f.temperature)
    left.w = host.weights(left.z)
    left.keep(host.typical_p(left.z, left.w, f.typical_p))
    left.keep(host.top_p(left.z, left.w, f.top_p))
    ids = np.arange(len(x)) if left.ids is None else left.ids
    return ids[left.z > _LOWEST].tolist()


@pytest.mark.parametrize("size", [5, 64, 1000])
@pytest.mark.parametrize("ties", [False, True])
def test_the_host_samplers_filters_keep_the_same_tokens(size: int, ties: bool) -> None:
    rng = np.random.default_rng(size + ties)
    for _ in range(120):
        rows = (rng.standard_normal((2, size)) * rng.choice([0.3, 2, 5])).astype(np.float32)
        if ties:
            rows = np.round(rows * 2) / 2
        chosen = rng.random(4) < 0.6
        f = Filters(
            temperature=float(rng.uniform(0.3, 2)),
            top_k=int(rng.integers(1, size + 3)) if chosen[0] else 0,
            top_p=float(rng.random()) if chosen[1] else 1.0,
            min_p=float(rng.random() * 0.5) if chosen[2] else 0.0,
            typical_p=float(rng.uniform(0.05, 1)) if chosen[3] else 1.0,
        )
        ours = f(torch.from_numpy(rows))
        for row, left in zip(rows, ours, strict=True):
            drawable = left > left.max() + _LOWEST
            assert drawable.nonzero().squeeze(-1).tolist() == host_survivors(row, f), f


# Rows and draws


def test_a_row_is_filtered_as_alone() -> None:
    x = torch.randn(7, 500, generator=torch.Generator().manual_seed(1)) * 3
    f = Filters(0.8, top_k=100, top_p=0.9, min_p=0.001, typical_p=0.95)
    together = f(x)
    assert all(torch.equal(together[i : i + 1], f(x[i : i + 1])) for i in range(len(x)))


@pytest.mark.parametrize("size", [1, 2, 300])
@pytest.mark.parametrize(
    "f", [Filters(top_p=0.0), Filters(top_k=1), Filters(min_p=1.0), Filters(typical_p=1e-9), Filters(0.0)]
)
def test_at_least_one_token_always_stays(f: Filters, size: int) -> None:
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    assert (torch.isfinite(f(x)).sum(-1) == 1).all()
    x[:, 1:] = float("-inf")  # nor does what is already masked take its place
    assert all(kept(row[None]) == [0] for row in f(x))


def test_a_row_draws_the_same_whoever_is_beside_it() -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    f = Filters(top_p=0.9)
    together = [sample(x, f, g).tolist() for g in [row_generators(5, range(6))] for _ in range(4)]
    for i in range(6):
        generator = row_generators(5, [i])
        assert [sample(x[i : i + 1], f, generator).item() for _ in range(4)] == [draws[i] for draws in together]


def test_draws_follow_the_distribution() -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    x = logits_of(p).float().expand(8000, 4)
    counts = torch.bincount(sample(x, Filters(), row_generators(0, range(8000))), minlength=4)
    # 5 standard deviations of a binomial share are 5 * sqrt(.25 / 8000) < .028
    assert (counts / 8000).tolist() == pytest.approx(p, abs=0.028)
    filtered = sample(x, Filters(top_p=0.7), row_generators(1, range(8000)))
    # The mass before tokens 0 and 1 is 0 and .4: renormalised 4/7 and 3/7.
    assert torch.bincount(filtered, minlength=4)[2:].tolist() == [0, 0]
    assert (filtered == 0).float().mean().item() == pytest.approx(4 / 7, abs=0.028)


def test_the_ends_of_the_range_draw_tokens_that_have_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    for u, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-24, 3)):
        monkeypatch.setattr(torch, "rand", lambda *_, u=u, **__: torch.tensor(u))
        assert sample(x, Filters(), [torch.Generator()]).tolist() == [token]


def test_generators_depend_on_seed_and_row_only() -> None:
    def first(seed: int, row: int) -> float:
        return torch.rand((), generator=row_generators(seed, [row])[0]).item()

    assert first(0, 3) == torch.rand((), generator=row_generators(0, range(5))[3]).item()
    assert len({first(s, r) for s in (-1, 0, 1, 2) for r in range(50)}) == 200


# Bad input


def test_logits_that_are_not_finite_are_an_error() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(EngineError, match="not finite"):
            sample(torch.tensor([[0.0, 1.0], [0.0, bad]]), Filters(0.0))
    with pytest.raises(EngineError, match="not finite"):
        sample(torch.full((1, 3), float("-inf")), Filters(0.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", -0.1),
     ("top_p", 1.5), ("min_p", 2.0), ("typical_p", 0.0), ("top_k", -2)],
)  # fmt: skip
def test_a_value_outside_its_range_is_named_as_the_engine_names_it(field: str, value: float) -> None:
    for kind in (Filters, SamplingParams):
        with pytest.raises(RequestError, match=field) as error:
            kind(**{field: value})
        assert error.value.field == field


def test_drawing_needs_a_generator_for_each_row() -> None:
    for generators in (None, row_generators(0, [0])):
        with pytest.raises(RequestError, match="generator"):
            sample(torch.zeros(2, 3), Filters(), generators)


def test_one_threshold_of_greedy() -> None:
    assert filters.GREEDY_TEMPERATURE == GREEDY_TEMPERATURE
