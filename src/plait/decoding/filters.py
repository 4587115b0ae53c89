"""Filters on logits [B, V] (torch): which tokens may still be drawn, and the draw.

Every filter takes logits of any float type and gives fp32 logits of the same shape in which what it drops is -inf;
it judges the distribution of what is left, renormalised. Rows do not see one another, and at least one token of each
always stays. The host sampler has the same filters for one row in numpy (plait.engine.filters); the two are tested
to keep the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.errors import EngineError, RequestError

# Below this temperature the distribution is a point on the largest logit, as in SamplingParams.
GREEDY_TEMPERATURE = 1e-4

_DROPPED = float("-inf")
_SEED_BITS = (1 << 64) - 1


def temperature(logits: Tensor, value: float) -> Tensor:
    """logits / value, less the row's largest (which changes no probability, and overflows for no temperature).

    Below 1e-4, so at 0, only the largest logit of a row stays; of equal ones the lowest id.
    """
    x = logits.float()
    if value < GREEDY_TEMPERATURE:
        best = x.argmax(-1, keepdim=True)
        return torch.full_like(x, _DROPPED).scatter(-1, best, 0.0)
    return (x - x.amax(-1, keepdim=True)) / value


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep every token that is not below the k-th largest (ties stay); k <= 0 or k >= V keeps all."""
    x = logits.float()
    if k <= 0 or k >= x.shape[-1]:
        return x
    return x.masked_fill(x < x.topk(k, dim=-1).values[..., -1:], _DROPPED)


def min_p(logits: Tensor, threshold: float) -> Tensor:
    """Keep tokens at least `threshold` times as likely as the most likely one (Nguyen et al. 2024); 0 keeps all."""
    x = logits.float()
    if threshold <= 0:
        return x
    return x.masked_fill(x < x.amax(-1, keepdim=True) + math.log(threshold), _DROPPED)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep, most likely first (equal ones by id), tokens while the mass before them is below p (Holtzman et al. 2020).

    The first always stays. p >= 1 keeps all: the sums are fp32, and may reach 1 too early.
    """
    x = logits.float()
    if p >= 1:
        return x
    ranked, order = x.sort(dim=-1, descending=True, stable=True)
    return _keep_mass(x, order, ranked.softmax(-1), p)


def typical_p(logits: Tensor, p: float) -> Tensor:
    """Keep, nearest to the entropy first, tokens while the mass before them is below p (Meister et al. 2022).

    A token's distance is |-log p_i - H|; equal ones go by id. The first always stays, p >= 1 keeps all.
    """
    x = logits.float()
    if p >= 1:
        return x
    log_p = x.log_softmax(-1)
    probabilities = log_p.exp()
    entropy = -(probabilities * log_p.masked_fill(probabilities == 0, 0.0)).sum(-1, keepdim=True)
    order = (-log_p - entropy).abs().argsort(dim=-1, stable=True)
    return _keep_mass(x, order, probabilities.gather(-1, order), p)


def _keep_mass(x: Tensor, order: Tensor, probabilities: Tensor, p: float) -> Tensor:
    """Logits x without the tokens that have a mass of p or more before them; order [B, V], probabilities in it."""
    dropped = torch.zeros_like(probabilities, dtype=torch.bool)
    dropped[..., 1:] = probabilities.cumsum(-1)[..., :-1] >= p
    return x.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), _DROPPED)


@dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn: SamplingParams' names, meanings and ranges, for torch logits.

    temperature: 0 .. 100; below 1e-4 the largest logit is taken. top_k: 0 or -1 is off. top_p, min_p: 0 .. 1.
    typical_p: above 0, at most 1 (off). Raises RequestError naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    def __post_init__(self) -> None:
        for name, high in (("temperature", 100.0), ("top_p", 1.0), ("min_p", 1.0), ("typical_p", 1.0)):
            value = getattr(self, name)
            if not 0 <= value <= high:  # NaN too
                raise RequestError(f"{name} must be 0 to {high:g}, got {value}", field=name)
        if self.typical_p == 0:
            raise RequestError("typical_p must be above 0; 1 is off", field="typical_p")
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1 or more (0 and -1 are off), got {self.top_k}", field="top_k")

    @property
    def greedy(self) -> bool:
        """True when the largest logit is taken and nothing is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    def __call__(self, logits: Tensor) -> Tensor:
        """fp32 logits [B, V] of what may be drawn: temperature, min-p, top-k, typical-p, top-p, in this order."""
        x = min_p(temperature(logits, self.temperature), self.min_p)
        return top_p(typical_p(top_k(x, self.top_k), self.typical_p), self.top_p)


def row_generators(seed: int, rows: Sequence[int]) -> list[torch.Generator]:
    """A generator for each row number, seeded by (seed, row) alone: a row's draws do not depend on its batch."""
    generators = []
    for row in rows:
        # The engine of torch's generator takes 32 bits: near seeds are spread over them first.
        word = int(np.random.SeedSequence([seed & _SEED_BITS, row]).generate_state(1)[0])
        generators.append(torch.Generator().manual_seed(word))
    return generators


def sample(logits: Tensor, filters: Filters, generators: Sequence[torch.Generator] | None = None) -> Tensor:
    """One token for each row of logits [B, V], int64 [B].

    A drawn row takes one number of its own generator (on the CPU) and inverts the cumulative distribution there;
    greedy filters take the largest logit, lowest id on ties, and need none. Raises EngineError for logits whose
    largest is not finite, RequestError where generators are missing.
    """
    if not torch.isfinite(logits.amax(-1)).all():
        raise EngineError("the model produced logits that are not finite (NaN or infinity)")
    if filters.greedy:
        return logits.argmax(-1)
    if generators is None or len(generators) != len(logits):
        raise RequestError(f"drawing {len(logits)} rows needs a generator for each", field="generators")
    cumulative = filters(logits).softmax(-1).cumsum(-1)
    u = torch.stack([torch.rand((), generator=g) for g in generators]).to(logits.device)
    # u is below 1 but u times the total may round up to it: the last token with a probability takes that draw.
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, u.unsqueeze(-1) * total, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(found, last).squeeze(-1)
