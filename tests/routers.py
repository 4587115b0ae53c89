"""Choices of experts that are worked out by hand, for the reference operation and for the kernel."""

from __future__ import annotations

from math import log

from plait.ops.spec import RouterSpec


def logits(*scores: float) -> list[float]:
    """What a sigmoid makes these scores of."""
    return [log(score / (1 - score)) for score in scores]


# Name -> logits, selection bias, router, the chosen experts, their weights.
BY_HAND: dict[str, tuple[list[float], list[float] | None, RouterSpec, list[int], list[float]]] = {
    # e^2 / (e^2 + e + 1 + 1/e), and the same without what was not chosen.
    "softmax over all": ([2.0, 1.0, 0.0, -1.0], None, RouterSpec(4, 2), [0, 1], [0.643914, 0.236883]),
    "renormalised": (
        [2.0, 1.0, 0.0, -1.0],
        None,
        RouterSpec(4, 2, renormalise="always"),
        [0, 1],
        [0.731059, 0.268941],
    ),
    # The scale does not depend on the renormalisation.
    "scaled": ([2.0, 1.0, 0.0, -1.0], None, RouterSpec(4, 2, scale=16.0), [0, 1], [16 * 0.643914, 16 * 0.236883]),
    "scaled and renormalised": (
        [2.0, 1.0, 0.0, -1.0],
        None,
        RouterSpec(4, 2, renormalise="always", scale=16.0),
        [0, 1],
        [16 * 0.731059, 16 * 0.268941],
    ),
    # 0.1 + 5 and 0.8 are the best two; the weights are 0.1 and 0.8, not what selected them: 2.5 / 9 and 2.5 * 8 / 9.
    "selected by a bias": (
        logits(0.9, 0.8, 0.1, 0.1),
        [-5.0, 0.0, 5.0, 0.0],
        RouterSpec(4, 2, "sigmoid", "always", 2.5),
        [2, 1],
        [0.277778, 2.222222],
    ),
    # All selection scores are negative: of the kept groups, 1 and 2, too. A 0 for a dropped one would be larger.
    "groups below zero": (
        logits(0.9, 0.9, 0.5, 0.4, 0.6, 0.2, 0.8, 0.8),
        [-9.0, -9.0, -2.0, -2.0, -2.0, -2.0, -9.0, -9.0],
        RouterSpec(8, 2, "sigmoid", "never", 1.0, 4, 2, "two_best", "minus_infinity"),
        [4, 2],
        [0.6, 0.5],
    ),
}
