"""Beam search on a left-padded batch: W hypotheses per row go on together; the prompt is computed once.

Two rules for what becomes of a hypothesis that ends:

`pool`: it leaves the beams for a pool of the W best finished ones, scored sum / length^penalty, and an unfinished one
takes its place (what transformers and fairseq do). `frozen`: it keeps its place, extended at no cost, so it can be
pushed out by better ones; sum / length^penalty picks among what is there at the end.

A length counts generated tokens, the end token included, of finished and cut hypotheses alike; the prompt never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from plait.decoding.generation import LeftPaddedBatch, check_room, inference, left_padded
from plait.decoding.models import step_model
from plait.errors import EngineError, RequestError

EarlyStopping = bool | Literal["never"]
Semantics = Literal["pool", "frozen"]
_NEVER = float("-inf")


@dataclass(frozen=True)
class Beams:
    """How to search.

    width: hypotheses per row. length_penalty: exponent of the length that sums are divided by; above 0 longer ones
    gain. early_stopping (`pool` only), of a row whose pool is full: True stops it; False stops it once the best
    running beam, at its present length, is no better than the worst in the pool; "never" supposes the length that is
    best for it, max_new_tokens where the penalty is above 0. Raises RequestError naming the field.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    semantics: Semantics = "pool"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise RequestError(f"beam width must be at least 1, got {self.width}", field="width")
        if not abs(self.length_penalty) <= 10:  # NaN too
            raise RequestError(f"length_penalty must be -10 to 10, got {self.length_penalty}", field="length_penalty")
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f"early_stopping is true, false or never, not {self.early_stopping!r}", "early_stopping")
        if self.semantics not in ("pool", "frozen"):
            raise RequestError(f"semantics is pool or frozen, not {self.semantics!r}", field="semantics")
        if self.semantics == "frozen" and self.early_stopping:
            raise RequestError("frozen beams stop when all have ended: leave early_stopping out", "early_stopping")


@dataclass(frozen=True)
class Hypothesis:
    """tokens: generated ones before the end token. score: sum of log p / length^penalty. ended: by an end token."""

    tokens: list[int]
    score: float
    ended: bool


def beam_search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    beams: Beams,
    *,
    eos_ids: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """For each prompt its hypotheses, best first: at most `width`, at least one.

    model: as for `generate`; past states must be selectable by row. Scores are fp32. Raises RequestError and
    CapacityError as `generate` does.
    """
    stepped = step_model(model)
    ids, mask = left_padded(prompts, next(iter(eos_ids), 0), stepped.device)
    check_room(stepped, prompts, max_new_tokens)
    ends = torch.tensor(list(eos_ids), dtype=torch.long, device=ids.device)
    kind = _Pool if beams.semantics == "pool" else _Frozen
    with inference(model):
        batch = LeftPaddedBatch(stepped, ids, mask, max_new_tokens)
        search = kind(beams, len(ids), max_new_tokens, ends)
        for step in range(max_new_tokens):
            log_p = _log_probabilities(batch.logits).unflatten(0, (len(ids), -1))
            search.step(step, log_p)
            if search.done or step + 1 == max_new_tokens:
                break
            # Before the first step there is one row per prompt, afterwards one per beam.
            first = torch.arange(len(ids), device=ids.device).unsqueeze(-1) * log_p.shape[1]
            batch.select((first + search.parents).flatten())
            batch.advance(search.tokens[:, :, step].flatten())
    return [search.hypotheses(row) for row in range(len(ids))]


def _log_probabilities(logits: Tensor) -> Tensor:
    if not torch.isfinite(logits.amax(-1)).all():
        raise EngineError("the model produced logits that are not finite (NaN or infinity)")
    return logits.log_softmax(-1)


@dataclass
class _Hypotheses:
    """W per row: tokens int64 [B, W, T], scores fp32 [B, W] (-inf: nothing there), lengths int64 and ended bool."""

    tokens: Tensor
    scores: Tensor
    lengths: Tensor
    ended: Tensor

    def pick(self, places: Tensor) -> _Hypotheses:
        """Those at places [B, K]."""
        tokens = self.tokens.gather(1, places.unsqueeze(-1).expand(-1, -1, self.tokens.shape[-1]))
        return _Hypotheses(tokens, *(x.gather(1, places) for x in (self.scores, self.lengths, self.ended)))

    def beside(self, other: _Hypotheses) -> _Hypotheses:
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("tokens", "scores", "lengths", "ended"))
        return _Hypotheses(*(torch.cat(pair, 1) for pair in pairs))

    def of_row(self, row: int) -> list[Hypothesis]:
        """As plain values, best first."""
        found = []
        for k in self.scores[row].argsort(descending=True, stable=True).tolist():
            if self.scores[row, k] > _NEVER:
                ended = bool(self.ended[row, k])
                tokens = self.tokens[row, k, : int(self.lengths[row, k]) - ended].tolist()
                found.append(Hypothesis(tokens, float(self.scores[row, k]), ended))
        return found


def _nothing(rows: int, width: int, length: int, device: torch.device) -> _Hypotheses:
    return _Hypotheses(
        torch.zeros(rows, width, length, dtype=torch.long, device=device),
        torch.full((rows, width), _NEVER, device=device),
        torch.zeros(rows, width, dtype=torch.long, device=device),
        torch.zeros(rows, width, dtype=torch.bool, device=device),
    )


class _Search:
    """The running beams. parents: int64 [B, W], which of the last step's beams each goes on from."""

    def __init__(self, beams: Beams, rows: int, max_new_tokens: int, ends: Tensor) -> None:
        self.beams, self._max_new_tokens, self._ends = beams, max_new_tokens, ends
        self._running = _nothing(rows, 1, max_new_tokens, ends.device)
        self._running.scores.zero_()
        self.parents = torch.zeros(rows, beams.width, dtype=torch.long, device=ends.device)
        self.done = False

    @property
    def tokens(self) -> Tensor:
        return self._running.tokens

    def _best(self, step: int, totals: Tensor, count: int) -> tuple[_Hypotheses, Tensor]:
        """The `count` best of all continuations, best first, by their sums [B, W, V], and the beams they go on from."""
        vocabulary = totals.shape[-1]
        flat = totals.flatten(1)
        if flat.shape[1] < count:  # more beams than tokens: what is missing is not there
            flat = torch.nn.functional.pad(flat, (0, count - flat.shape[1]), value=_NEVER)
        sums, places = flat.topk(count, dim=1)
        parents = (places // vocabulary).clamp(max=totals.shape[1] - 1)
        chosen = self._running.pick(parents)
        chosen.tokens[:, :, step] = places % vocabulary
        return replace(chosen, scores=sums), parents

    def _penalised(self, sums: Tensor, lengths: Tensor | int) -> Tensor:
        return sums / lengths**self.beams.length_penalty


class _Pool(_Search):
    def __init__(self, beams: Beams, rows: int, max_new_tokens: int, ends: Tensor) -> None:
        super().__init__(beams, rows, max_new_tokens, ends)
        self._pool = _nothing(rows, beams.width, max_new_tokens, ends.device)
        self._open = torch.ones(rows, dtype=torch.bool, device=ends.device)

    def step(self, step: int, log_p: Tensor) -> None:
        """log_p: fp32 [B, W, V], of the beams' next tokens ([B, 1, V] in the first step)."""
        width = self.beams.width
        # However many of them end, at least W that go on are among so many.
        count = max(2, 1 + len(self._ends)) * width
        best, parents = self._best(step, self._running.scores.unsqueeze(-1) + log_p, count)
        ended = torch.isin(best.tokens[:, :, step], self._ends)
        cut = ended | (step + 1 == self._max_new_tokens)
        self._collect(step, replace(best, ended=ended), cut)
        going, places = best.scores.masked_fill(cut, _NEVER).topk(width, dim=1)
        self._running = replace(best.pick(places), scores=going)
        self.parents = parents.gather(1, places)
        self._close(step)

    def _collect(self, step: int, best: _Hypotheses, finished: Tensor) -> None:
        """Finished candidates of the first W enter the pools of rows that are still open."""
        width = self.beams.width
        enters = finished & self._open.unsqueeze(-1)
        enters[:, width:] = False
        scores = self._penalised(best.scores, step + 1).masked_fill(~enters, _NEVER)
        new = replace(best, scores=scores, lengths=torch.full_like(best.lengths, step + 1))
        merged = self._pool.beside(new)
        self._pool = merged.pick(merged.scores.topk(width, dim=1).indices)

    def _close(self, step: int) -> None:
        """Rows that can gain no more, by the rule of `early_stopping`."""
        beams = self.beams
        longest = beams.early_stopping == "never" and beams.length_penalty > 0
        length = self._max_new_tokens if longest else step + 1
        running = self._running.scores[:, 0]
        possible = self._penalised(running, length)
        worst = self._pool.scores.amin(-1)  # -inf while the pool is not full
        full = worst > _NEVER
        self._open &= (running > _NEVER) & (~full | ((possible > worst) & (beams.early_stopping is not True)))
        self.done = not bool(self._open.any())

    def hypotheses(self, row: int) -> list[Hypothesis]:
        return self._pool.of_row(row)


class _Frozen(_Search):
    def step(self, step: int, log_p: Tensor) -> None:
        """log_p: fp32 [B, W, V], of the beams' next tokens ([B, 1, V] in the first step)."""
        running = self._running
        totals = running.scores.unsqueeze(-1) + log_p
        if len(self._ends):
            # A finished beam has one continuation, the end token at no cost.
            stays = torch.full_like(totals, _NEVER)
            stays[:, :, self._ends[0]] = running.scores
            totals = torch.where(running.ended.unsqueeze(-1), stays, totals)
        best, self.parents = self._best(step, totals, self.beams.width)
        lengths = torch.where(best.ended, best.lengths, step + 1)
        ended = best.ended | torch.isin(best.tokens[:, :, step], self._ends)
        self._running = replace(best, lengths=lengths, ended=ended)
        self.done = bool((ended | (best.scores == _NEVER)).all())

    def hypotheses(self, row: int) -> list[Hypothesis]:
        scores = self._penalised(self._running.scores, self._running.lengths)
        return replace(self._running, scores=scores).of_row(row)
