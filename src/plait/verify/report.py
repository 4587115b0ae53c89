"""A verification as a table for people and as a document for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.verify.compare import Comparison, GreedyComparison

HEADER = ("prompt", "tokens", "max |Δ log p|", "at", "of tolerance", "mean", "top-1 equal", "greedy text")


@dataclass
class Verification:
    """Everything that was compared. model, reference: what they were; notes: what limits the comparison."""

    model: str
    reference: str
    dtype: str
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """Plain data; positions count from 0 and mean the prediction after that token."""
        return {
            "model": self.model,
            "reference": self.reference,
            "dtype": self.dtype,
            "passed": self.passed,
            "notes": self.notes,
            "prompts": [_document(c) for c in self.comparisons],
        }


def rows(verification: Verification) -> list[tuple[str, ...]]:
    """One row of the table per prompt, under HEADER."""
    return [
        (
            c.name,
            str(len(c.deltas)),
            f"{c.deltas[c.worst]:.2e}",
            str(c.worst),
            f"{c.deltas[c.worst] / c.tolerance:.3f}",
            f"{c.mean_delta:.1e}",
            f"{c.top1:.1%}",
            greedy_cell(c.greedy),
        )
        for c in verification.comparisons
    ]


def greedy_cell(g: GreedyComparison | None) -> str:
    """'32 tokens equal', or where the texts part."""
    if g is None:
        return "-"
    if g.divergence is None:
        return f"{len(g.ours)} tokens equal"
    return f"differs at {g.divergence}" + (f" (a near tie at {g.compared})" if g.passed else "")


def verdict(verification: Verification, show: Callable[[int], str] = str) -> list[str]:
    """The last lines: whether the two agree, and otherwise where they part first. show: a token id as text."""
    wrong = [c for c in verification.comparisons if not c.passed]
    total = sum(len(c.deltas) for c in verification.comparisons)
    if not wrong:
        worst = max(c.deltas[c.worst] / c.tolerance for c in verification.comparisons)
        count = len(verification.comparisons)
        return [f"AGREE: {total} positions in {count} prompts, at most {worst:.3f} of the tolerance"]
    lines = [f"DIFFER: {len(wrong)} of {len(verification.comparisons)} prompts ({total} positions)"]
    for c in wrong:
        lines.append(f"  {c.name}: {_where(c, show)}")
    return lines


def _where(c: Comparison, show: Callable[[int], str]) -> str:
    parts = []
    if c.first_wrong is not None:
        beyond = sum(not d <= c.tolerance for d in c.deltas)
        parts.append(
            f"position {c.first_wrong} (after token {show(c.token_ids[c.first_wrong])}) is the first of {beyond} beyond"
            f" the tolerance of {c.tolerance:.1e}, by {c.deltas[c.first_wrong]:.2e}"
        )
    if c.greedy is not None and not c.greedy.passed:
        at = c.greedy.divergence
        assert at is not None
        theirs, ours = show(c.greedy.reference[at]), show(c.greedy.ours[at])
        parts.append(f"the greedy texts part at token {at}: {theirs} in the reference, {ours} here")
    return "; ".join(parts)


def _document(c: Comparison) -> dict[str, Any]:
    return {
        "name": c.name,
        "passed": c.passed,
        "num_prompt_tokens": c.num_prompt_tokens,
        "num_positions": len(c.deltas),
        "tolerance": c.tolerance,
        "largest_logit": c.largest_logit,
        "max_abs_delta_logprob": _number(c.deltas[c.worst]),
        "max_position": c.worst,
        "mean_abs_delta_logprob": _number(c.mean_delta),
        "first_position_beyond_tolerance": c.first_wrong,
        "top1_agreement": c.top1,
        "per_position": _numbers(c.deltas),
        "greedy": None if c.greedy is None else _greedy_document(c.greedy),
    }


def _greedy_document(g: GreedyComparison) -> dict[str, Any]:
    return {
        "num_tokens": len(g.reference),
        "compared_tokens": g.compared,
        "first_divergence": g.divergence,
        "passed": g.passed,
        "reference_token_ids": g.reference,
        "token_ids": g.ours,
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [_number(v) for v in values]


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity: null."""
    return value if abs(value) < float("inf") else None
