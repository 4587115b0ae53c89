"""Batched generation with left padding: every row is what it would be alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.decoding.filters import Filters, sample
from plait.decoding.models import StepModel, step_model
from plait.errors import CapacityError, RequestError
from plait.model.decoder import evaluating

GREEDY = Filters(temperature=0.0)


@dataclass(frozen=True)
class Generation:
    """What a batch generated.

    ids: int64 [B, T], every token as it was emitted: up to and including the row's first end token, then padding.
    lengths: per row, tokens before its end token (T where there is none). ended: per row, whether there is one.
    """

    ids: Tensor
    lengths: list[int]
    ended: list[bool]

    @property
    def tokens(self) -> list[list[int]]:
        """Each row, cut at its first end token."""
        return [row[:length] for row, length in zip(self.ids.tolist(), self.lengths, strict=True)]


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    filters: Filters = GREEDY,
    *,
    eos_ids: Sequence[int] = (),
    pad_id: int | None = None,
    generators: Sequence[torch.Generator] | None = None,
) -> Generation:
    """Continue prompts of token ids with a `Decoder` or a model object of transformers (or any `StepModel`).

    filters: greedy unless given; what draws needs a generator per row (`row_generators`). eos_ids: end a row. pad_id:
    emitted after it, default the first of eos_ids. Gradients and dropout are off. Raises RequestError for an empty
    prompt, CapacityError where prompt and new tokens exceed the model's positions.
    """
    stepped = step_model(model)
    pad = int(pad_id if pad_id is not None else next(iter(eos_ids), 0))
    ids, mask = left_padded(prompts, pad, stepped.device)
    check_room(stepped, prompts, max_new_tokens)
    ends = torch.tensor(list(eos_ids), dtype=torch.long, device=ids.device)
    emitted = ids.new_full((len(ids), max_new_tokens), pad)
    with inference(model):
        batch = LeftPaddedBatch(stepped, ids, mask, max_new_tokens)
        rows = torch.arange(len(ids), device=ids.device)  # of the prompts, for each row of the batch
        done = torch.zeros_like(rows, dtype=torch.bool)
        drawing = None if generators is None else list(generators)
        for step in range(max_new_tokens):
            tokens = sample(batch.logits, filters, drawing).masked_fill(done, pad)
            emitted[rows, step] = tokens
            done |= torch.isin(tokens, ends)
            if done.all() or step + 1 == max_new_tokens:
                break
            if 4 * int(done.sum()) >= len(done):
                # Rows are independent, so finished ones can be left out: their padding needs no forward.
                going = (~done).nonzero().squeeze(-1)
                rows, tokens, done = rows[going], tokens[going], done[going]
                drawing = None if drawing is None else [drawing[i] for i in going.tolist()]
                batch.select(going)
            batch.advance(tokens)
    return _cut(emitted[:, : step + 1], ends)


class LeftPaddedBatch:
    """Rows that advance together, one token at a time. logits: fp32 [B, V] of the latest token of each."""

    def __init__(self, model: StepModel, ids: Tensor, mask: Tensor, max_new_tokens: int) -> None:
        """ids [B, T], mask bool [B, T] as `left_padded` gives them."""
        self._model, self._mask = model, mask
        self._lengths = mask.sum(-1)
        past = model.start(self._lengths + max_new_tokens)
        self.logits, self._past = model.forward(ids, mask, true_positions(mask), past)

    def advance(self, tokens: Tensor) -> None:
        """Feed one token per row, int64 [B]."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        positions = self._lengths.unsqueeze(-1)
        self._lengths = self._lengths + 1
        self.logits, self._past = self._model.forward(tokens.unsqueeze(-1), self._mask, positions, self._past)

    def select(self, rows: Tensor) -> None:
        """Row b becomes what row rows[b] was; the logits are stale until the next `advance`."""
        self._mask, self._lengths = self._mask[rows], self._lengths[rows]
        self._past = self._model.select(self._past, rows)


def left_padded(
    prompts: Sequence[Sequence[int]], pad_id: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """ids int64 [B, T] and mask bool [B, T], False at the padding before the shorter ones. [7, 8] beside [1, 2, 3, 4]
    gives [[pad, pad, 7, 8], [1, 2, 3, 4]]."""
    if not prompts:
        raise RequestError("no prompts were given", field="prompts")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise RequestError(f"prompt {number} is empty: give at least one token", field="prompts")
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = True
    return ids.to(device), mask.to(device)


def true_positions(mask: Tensor) -> Tensor:
    """int64 [B, T]: the place of each token in its own row, 0 at the padding before it."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def check_room(model: StepModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """RequestError or CapacityError where so many new tokens are not possible."""
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens must be at least 1, got {max_new_tokens}", field="max_new_tokens")
    longest = max(map(len, prompts))
    if model.max_positions is not None and longest + max_new_tokens > model.max_positions:
        raise CapacityError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's {model.max_positions}"
            " positions: shorten the prompt or lower max_new_tokens",
            field="max_new_tokens",
        )


def inference(model: Any) -> ExitStack:
    """Without gradients, and where the model is a module without dropout."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode())
    if isinstance(model, nn.Module):
        stack.enter_context(evaluating(model))
    return stack


def _cut(ids: Tensor, ends: Tensor) -> Generation:
    hits = torch.isin(ids, ends)
    ended = hits.any(-1)
    lengths = torch.where(ended, hits.int().argmax(-1), ids.shape[1])
    return Generation(ids, lengths.tolist(), ended.tolist())
