"""Factors of the learning rate on the token clock, by arithmetic."""

from __future__ import annotations

from math import cos, pi

import pytest

from plait.errors import UsageError
from plait.training.schedule import SCHEDULES, ScheduleConfig, check_schedule, factor

TOTAL = 1_000


def factors(kind: str, *tokens: int, **options: float) -> list[float]:
    config = ScheduleConfig(kind, **options)
    return [factor(config, t, TOTAL) for t in tokens]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_warm_up_is_linear_over_two_hundredths(kind: str) -> None:
    assert factors(kind, 1, 10, 20) == pytest.approx([0.05, 0.5, 1.0])


def test_cosine() -> None:
    """After the warm-up a half wave over the 980 tokens that are left: at 510 half of it is done."""
    third = 0.1 + 0.9 * 0.5 * (1 + cos(pi * 245 / 980))
    assert factors("cosine", 20, 265, 510, 1_000, 1_200) == pytest.approx([1.0, third, 0.55, 0.1, 0.1])


def test_wsd() -> None:
    assert factors("wsd", 20, 500, 800, 900, 1_000) == pytest.approx([1.0, 1.0, 1.0, 0.55, 0.1])
    assert factors("wsd", 700, 750, floor=0.0, decay=0.5) == pytest.approx([0.6, 0.5])


def test_inverse_square_root() -> None:
    assert factors("inverse_sqrt", 20, 80, 180, floor=0.0) == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert factors("inverse_sqrt", 1_000, floor=0.4) == pytest.approx([0.4])


def test_constant() -> None:
    assert factors("constant", 20, 999, 2_000) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", sorted(SCHEDULES.keys() - {"inverse_sqrt"}))
def test_without_a_warm_up_it_begins_at_one(kind: str) -> None:
    assert factors(kind, 1, warmup=0.0) == pytest.approx([1.0], abs=1e-4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ScheduleConfig("cosin"), "cosine, wsd"),
        (ScheduleConfig(warmup=1.5), r"schedule.warmup=1.5"),
        (ScheduleConfig(floor=-0.1), r"schedule.floor=-0.1"),
        (ScheduleConfig("inverse_sqrt", warmup=0.0), r"needs a warm-up"),
    ],
)
def test_impossible_schedules_are_refused(config: ScheduleConfig, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_schedule(config)
