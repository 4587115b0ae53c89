"""When are two greedy texts the same? Up to the first step where the reference itself is nearly undecided.

Both sides compute in fp32 and round differently, so texts are compared up to the first step at which the reference's
two best
log-probabilities lie within twice the tolerance of the logits. The caller prints how many comparisons ended that early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait.verify.compare import first_near_tie


@dataclass(frozen=True)
class Comparison:
    """compared: leading tokens that had to agree. ended_early: a near tie came first. difference: the first step
    that differs."""

    compared: int
    ended_early: bool
    difference: int | None


def tolerance(logits: torch.Tensor) -> float:
    """Largest allowed |delta log p| in fp32 for logits of this size: 1e-4 * max(1, max |logit| / 10)."""
    return 1e-4 * max(1.0, float(logits.abs().max()) / 10)


def compare_greedy(tokens: Sequence[int], logits: torch.Tensor) -> Comparison:
    """tokens: T greedy tokens of ours. logits [T, V]: the reference's, teacher-forced along them, row t choosing token
    t."""
    compared = first_near_tie(logits, 2 * tolerance(logits))
    differs = (logits.argmax(-1)[:compared] != torch.tensor(tokens)[:compared]).nonzero()
    return Comparison(compared, compared < len(tokens), int(differs[0]) if len(differs) else None)


def assert_same_texts(comparisons: Sequence[Comparison], label: str) -> None:
    """No text differs, and at most one text, or 2% of them, was cut short by a near tie."""
    early = sum(c.ended_early for c in comparisons)
    tokens = sum(c.compared for c in comparisons)
    print(f"{label}: {len(comparisons)} texts, {tokens} tokens equal, {early} comparisons ended early at a near tie")
    assert not [c for c in comparisons if c.difference is not None], comparisons
    assert early <= max(1, 0.02 * len(comparisons)), early
