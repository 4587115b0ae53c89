"""Medians, alternation, common prefixes, percentiles."""

from __future__ import annotations

import pytest

from plait.bench.summary import Summary, alternate, common_prefix, percentile, significant


def test_a_summary_is_median_and_range() -> None:
    found = Summary([3.0, 1.0, 2.0, 100.0, 2.5]).to_json()
    assert (found["median"], found["min"], found["max"]) == (2.5, 1.0, 100.0)
    assert found["values"] == [3.0, 1.0, 2.0, 100.0, 2.5]


def test_significant_digits() -> None:
    assert significant(12345.678) == 12350.0
    assert significant(0.00012345, 2) == 0.00012
    assert significant(0.0) == 0.0


def test_sides_alternate_in_turning_order_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    ticks: list[int] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = alternate({"a": lambda: side("a"), "b": lambda: side("b")}, 3, lambda: ticks.append(1))
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert found == {"a": [4, 5, 8], "b": [3, 6, 7]}
    assert len(ticks) == 8


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0), ([2], [1], 0)],
)
def test_common_prefix(left: list[int], right: list[int], equal: int) -> None:
    assert common_prefix(left, right) == equal


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100), (0.501, 51)])
def test_percentile_is_a_value_that_so_many_do_not_exceed(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value
