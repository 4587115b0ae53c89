"""Which expert received what: routing slots by layer, language, side of the sequence, and expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log
from typing import Any

import torch
from torch import Tensor

from plait.model.config import MixtureSpec
from plait.model.decoder import Decoder, Trace, evaluating
from plait.training.batch import Batch
from plait.training.data.constants import ROLE_SOURCE, ROLE_TARGET
from plait.training.loss import step_inputs
from plait.training.mixture import routing_sums

SIDES = {"source": ROLE_SOURCE, "target": ROLE_TARGET}
WHOLE = "all"


@dataclass(frozen=True)
class ExpertCounts:
    """slots: by row, such as `vi source`, and layer, how often each expert was chosen. Rows of data that tells no
    sides are languages, of data without languages the one row `all`."""

    layers: tuple[int, ...]
    slots: Mapping[str, Sequence[Sequence[int]]]

    def shares(self, row: str) -> list[list[float]]:
        """[L][E], of the row's slots in each layer; all 0 where it has none."""
        return [[count / max(sum(counts), 1) for count in counts] for counts in self.slots[row]]

    def heatmaps(self) -> dict[int, list[list[float]]]:
        """Layer -> rows by experts."""
        rows = [self.shares(row) for row in self.slots]
        return {layer: [shares[place] for shares in rows] for place, layer in enumerate(self.layers)}

    def entropy(self, row: str) -> list[float]:
        """Per layer, the entropy of the shares divided by ln E: 1 where all experts are used alike."""
        return [
            -sum(p * log(p) for p in shares if p) / log(len(shares)) if len(shares) > 1 else 1.0
            for shares in self.shares(row)
        ]

    def separation(self) -> dict[str, list[float]]:
        """Per layer the total variation distance of two rows' shares, for rows that have the language or the side in
        common."""
        found = {}
        for a, b in combinations(self.slots, 2):
            if set(a.split()) & set(b.split()):
                pairs = zip(self.shares(a), self.shares(b), strict=True)
                found[f"{a} / {b}"] = [total_variation(p, q) for p, q in pairs]
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "slots": {row: [list(counts) for counts in layers] for row, layers in self.slots.items()},
            "entropy": {row: self.entropy(row) for row in self.slots},
            "separation": self.separation(),
        }


def total_variation(p: Sequence[float], q: Sequence[float]) -> float:
    """Half the sum of |p - q|: 0 for equal distributions, 1 for those that have nothing in common."""
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def has_experts(decoder: Decoder) -> bool:
    return any(isinstance(layer.feed_forward, MixtureSpec) for layer in decoder.config.layers)


def count_experts(decoder: Decoder, batches: Iterable[Batch], languages: Sequence[str] = ()) -> ExpertCounts:
    """Route all tokens of the batches and count. Padding is not routed, so nowhere counted."""
    totals: dict[str, Tensor] = {}
    layers: tuple[int, ...] = ()
    with evaluating(decoder), torch.no_grad():
        for batch in batches:
            batch = batch.to(decoder.device)
            trace = Trace(router=True)
            decoder(batch.ids, step_inputs(batch), None, trace)
            for row, mask in _rows(batch, languages):
                if mask.any():
                    sums = routing_sums(trace.routing, mask)
                    layers = sums.layers
                    totals[row] = totals[row] + sums.slots if row in totals else sums.slots
    order = [row for row, _ in _names(languages) if row in totals] or list(totals)
    return ExpertCounts(layers, {row: totals[row].tolist() for row in order})


def _names(languages: Sequence[str]) -> list[tuple[str, tuple[int, int | None]]]:
    """(row, (language, role)), sources first."""
    sided = [(f"{name} {side}", (i, role)) for side, role in SIDES.items() for i, name in enumerate(languages)]
    return [*sided, *((name, (i, None)) for i, name in enumerate(languages))]


def _rows(batch: Batch, languages: Sequence[str]) -> Iterable[tuple[str, Tensor]]:
    if batch.languages is None:
        yield WHOLE, batch.token_mask
        return
    for row, (language, role) in _names(languages):
        if (role is None) == (batch.roles is None):
            mask = batch.token_mask & (batch.languages == language).unsqueeze(-1)
            yield row, mask if role is None or batch.roles is None else mask & (batch.roles == role)
