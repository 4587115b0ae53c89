"""Compares two models along the same tokens, and the greedy texts that they continue a prompt with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.verify.prompts import Prompt

# max |Δ log p| that rounding explains, per compute dtype, for logits up to 10; beyond, in proportion.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}
_SLICE = 64  # positions compared at once: two log-softmaxes of a large vocabulary need memory

Logits = Callable[[list[int]], Tensor]
Greedy = Callable[[list[tuple[list[int], int]]], list[list[int]]]  # (prompt, number of tokens) -> tokens of each


@dataclass
class Comparison:
    """One prompt, teacher-forced along the reference's own continuation.

    deltas: per position (of the prediction after that token) max |Δ log p| over the vocabulary; NaN where plait's
    logits are no numbers. same_top: per position, whether both rank the same token first; the lower id wins a tie.
    mean_delta: of |Δ log p| over positions and tokens.
    """

    name: str
    num_prompt_tokens: int
    token_ids: list[int]
    deltas: list[float]
    same_top: list[bool]
    mean_delta: float
    largest_logit: float
    tolerance: float
    greedy: GreedyComparison | None = None

    @property
    def worst(self) -> int:
        """The position with the largest deviation; the first that is no number."""
        broken = [i for i, d in enumerate(self.deltas) if d != d]
        return broken[0] if broken else max(range(len(self.deltas)), key=self.deltas.__getitem__)

    @property
    def first_wrong(self) -> int | None:
        """The first position beyond the tolerance."""
        return next((i for i, d in enumerate(self.deltas) if not d <= self.tolerance), None)

    @property
    def top1(self) -> float:
        """Share of positions at which both rank the same token first."""
        return sum(self.same_top) / len(self.same_top)

    @property
    def passed(self) -> bool:
        return self.first_wrong is None and (self.greedy is None or self.greedy.passed)


@dataclass
class GreedyComparison:
    """Greedy texts. compared: tokens up to the first near tie of the reference (all, if there is none).

    divergence: index of the first token that differs, None where all are equal.
    """

    reference: list[int]
    ours: list[int]
    compared: int
    divergence: int | None = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.reference, self.ours, strict=True)
        self.divergence = next((i for i, (a, b) in enumerate(pairs) if a != b), None)

    @property
    def passed(self) -> bool:
        """Equal, or different only from a near tie on."""
        return self.divergence is None or self.divergence >= self.compared


def compare(
    prompts: Sequence[Prompt],
    ours: Logits,
    ours_greedy: Greedy,
    reference: Any,
    new_tokens: int,
    max_positions: int,
    dtype: torch.dtype = torch.float32,
    advance: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """Compare on every prompt; reference: has `logits` and `greedy`. advance: called after each prompt.

    The reference continues the prompt greedily by `new_tokens` (as far as the positions reach); both models then
    read prompt and continuation, and plait continues all prompts in one batch through its own cache.
    """
    counts = [max(min(new_tokens, max_positions - len(p.token_ids)), 0) for p in prompts]
    going_on = [(p.token_ids, n) for p, n in zip(prompts, counts, strict=True) if n]
    texts = iter(ours_greedy(going_on) if going_on else [])
    results = []
    for prompt, count in zip(prompts, counts, strict=True):
        text = reference.greedy(prompt.token_ids, count) if count else []
        ids = prompt.token_ids + text
        expected = reference.logits(ids)
        result = compare_logits(prompt, ids, ours(ids), expected, TOLERANCES[dtype])
        if text:
            rows = expected[len(prompt.token_ids) - 1 : -1]
            result.greedy = GreedyComparison(text, next(texts), first_near_tie(rows, 2 * result.tolerance))
        results.append(result)
        advance()
    return results


def compare_logits(prompt: Prompt, ids: list[int], ours: Tensor, reference: Tensor, tolerance: float) -> Comparison:
    """Both logits [T, V] of the same tokens; tolerance: for logits up to 10."""
    deltas: list[float] = []
    same: list[bool] = []
    total = 0.0
    for mine, theirs in zip(ours.split(_SLICE), reference.split(_SLICE), strict=True):
        gap = (mine.float().log_softmax(-1) - theirs.log_softmax(-1)).abs()
        deltas += gap.amax(-1).tolist()
        total += gap.double().sum().item()
        same += (mine.argmax(-1) == theirs.argmax(-1)).tolist()
    largest = reference.abs().max().item()
    return Comparison(
        prompt.name,
        len(prompt.token_ids),
        ids,
        deltas,
        same,
        total / reference.numel(),
        largest,
        tolerance * max(1.0, largest / 10),
    )


def first_near_tie(logits: Tensor, margin: float) -> int:
    """The first row of logits [N, V] whose two best log-probabilities lie within `margin`; N where none does."""
    best = logits.topk(2, -1).values
    close = (best[:, 0] - best[:, 1] <= margin).nonzero()
    return int(close[0]) if len(close) else len(logits)
