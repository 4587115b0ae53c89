"""Repeated measurements and what is said of them: medians with their range, ratios of medians, a common prefix."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """Values of one quantity, one per alternation."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "median": significant(self.median),
            "min": significant(min(self.values)),
            "max": significant(max(self.values)),
            "values": [significant(value) for value in self.values],
        }


def significant(value: float, digits: int = 4) -> float:
    """The value with so many significant digits: 12345.6 -> 12350.0."""
    return float(f"{value:.{digits}g}")


def alternate(
    sides: Mapping[str, Callable[[], Any]], rounds: int, advance: Callable[[], None] = lambda: None, warm: int = 1
) -> dict[str, list[Any]]:
    """Run every side in turn, `warm` times for nothing and `rounds` times for the result: lists by side, in order.

    The order of the sides turns round from one round to the next, so that none always follows the same other one.
    advance: called after every run, (warm + rounds) * len(sides) times.
    """
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(warm + rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            result = sides[name]()
            advance()
            if number >= warm:
                found[name].append(result)
    return found


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens agree."""
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
