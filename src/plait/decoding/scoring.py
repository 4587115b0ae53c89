"""Teacher forcing: the negative log-likelihood of given continuations.

No [B, T, V] tensor of logits exists: the vocabulary is gone through in chunks of columns, and of every row only its
normaliser, its target's logit and its largest logit are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.decoding.generation import inference
from plait.errors import RequestError, UsageError
from plait.model.decoder import Decoder, head_logits
from plait.ops.step import StepInputs

# fp32 logits that exist at the same time, in numbers.
LOGIT_NUMBERS = 1 << 24
_LEAST_COLUMNS = 64
BATCH_TOKENS = 8192


class TargetScores(NamedTuple):
    """nll: fp32 [N], -log p of each target in nats. best: int64 [N], the most likely token, lowest id on ties."""

    nll: Tensor
    best: Tensor


def target_nll(decoder: Decoder, hidden: Tensor, targets: Tensor) -> TargetScores:
    """-log softmax(logits)[target] for hidden states [N, D] and targets int64 [N], a chunk of the vocabulary at a
    time. Differentiable, at the cost of keeping what autograd keeps: training has its own loss."""
    size = max(LOGIT_NUMBERS // max(len(hidden), 1), _LEAST_COLUMNS)
    normaliser = torch.full(targets.shape, float("-inf"), device=hidden.device)
    highest, best = normaliser.clone(), torch.zeros_like(targets)
    chosen = torch.zeros_like(normaliser)
    for start in range(0, decoder.config.vocab_size, size):
        stop = min(start + size, decoder.config.vocab_size)
        logits = head_logits(decoder.config, decoder.lm_head.columns(start, stop), hidden)
        normaliser = torch.logaddexp(normaliser, logits.logsumexp(-1))
        value, place = logits.max(-1)
        better = value > highest  # of equal ones the earlier chunk's stays
        highest, best = torch.where(better, value, highest), torch.where(better, place + start, best)
        inside = (targets >= start) & (targets < stop)
        own = logits.gather(-1, (targets - start).clamp(0, stop - start - 1).unsqueeze(-1)).squeeze(-1)
        chosen = torch.where(inside, own, chosen)
    return TargetScores(normaliser - chosen, best)


@dataclass(frozen=True)
class ContinuationScores:
    """Per row: nll float64 [B] in nats, tokens int64 [B] that it is of, and how many of them were the first choice."""

    nll: Tensor
    tokens: Tensor
    correct: Tensor

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy over all tokens."""
        return int(self.correct.sum()) / max(int(self.tokens.sum()), 1)


def continuation_nll(
    model: Any,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    batch_tokens: int = BATCH_TOKENS,
) -> ContinuationScores:
    """Score each continuation given its prompt, both as token ids, without gradients and dropout.

    model: a `Decoder`, or a causal model object of transformers (whose rows go one at a time, because it gives the
    logits of all of its positions). Rows of like length share a forward, padded on the right to at most batch_tokens
    tokens. An empty continuation scores 0 of 0 tokens. Raises RequestError for an empty prompt or unequal counts.
    """
    if len(prompts) != len(continuations):
        raise RequestError(f"{len(prompts)} prompts, {len(continuations)} continuations", field="continuations")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise RequestError(f"prompt {number} is empty: its continuation has nothing before it", field="prompts")
    score = _score_rows if isinstance(model, Decoder) else _score_alone
    count = len(prompts)
    nll = torch.zeros(count, dtype=torch.float64)
    correct = torch.zeros(count, dtype=torch.long)
    rows = [([*p, *c], len(c)) for p, c in zip(prompts, continuations, strict=True)]
    with inference(model):
        for group in batches_by_length([len(ids) for ids, _ in rows], batch_tokens):
            scores, hits, owner = score(model, [rows[i] for i in group])
            place = torch.tensor(group)[owner.cpu()]
            nll.index_add_(0, place, scores.double().cpu())
            correct.index_add_(0, place, hits.long().cpu())
    return ContinuationScores(nll, torch.tensor([len(c) for c in continuations]), correct)


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers, longest rows first, in groups whose longest row times their count stays within batch_tokens (a row
    that is longer than that goes alone)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        take = max(batch_tokens // max(lengths[order[0]], 1), 1)
        yield order[:take]
        order = order[take:]


def _score_rows(decoder: Decoder, rows: Sequence[tuple[list[int], int]]) -> tuple[Tensor, Tensor, Tensor]:
    """-log p, whether it was the first choice, and the row, of every scored token of (ids, scored at the end)."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    scored = torch.zeros(len(rows), width, dtype=torch.bool)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (tokens, count) in enumerate(rows):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
        mask[row, : len(tokens)] = True
        scored[row, len(tokens) - count : len(tokens)] = True
    ids, scored, mask = (x.to(decoder.device) for x in (ids, scored, mask))
    hidden = decoder(ids, StepInputs(token_mask=mask))
    targets = ids[scored]
    result = target_nll(decoder, hidden[:, :-1][scored[:, 1:]], targets)
    return result.nll, result.best == targets, scored.nonzero()[:, 0]


def _score_alone(model: Any, rows: Sequence[tuple[list[int], int]]) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a model object of transformers."""
    if not hasattr(model, "get_output_embeddings"):
        raise UsageError(
            f"cannot score with a {type(model).__name__}: give a Decoder or a causal model of transformers"
        )
    found, hits, owner = [], [], []
    for row, (tokens, count) in enumerate(rows):
        ids = torch.tensor([tokens], device=model.device)
        logits = model(input_ids=ids).logits[0, len(tokens) - count - 1 : -1].float()
        targets = ids[0, len(tokens) - count :]
        found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        hits.append(logits.argmax(-1) == targets)
        owner.append(torch.full_like(targets, row))
    return torch.cat(found), torch.cat(hits), torch.cat(owner)
