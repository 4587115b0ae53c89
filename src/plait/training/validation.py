"""Loss on held-out examples: token-weighted, in whole and by language."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp
from typing import Any

import torch

from plait.model.decoder import Decoder, evaluating
from plait.training.batch import Batch
from plait.training.data.constants import IGNORE
from plait.training.loss import step_inputs, token_losses
from plait.training.precision import Precision

# exp of more is no figure that anybody compares.
_MOST = 700.0


def validate(
    decoder: Decoder, batches: Iterable[Batch], precision: Precision, languages: tuple[str, ...] = ()
) -> dict[str, Any]:
    """{"loss": nats per target, "perplexity", "targets"}, and by language under "languages" where batches name them.

    Without dropout. Batches without a target count for nothing; where none has one, the loss is None.
    """
    sums: dict[int, list[float]] = {}
    with evaluating(decoder), torch.no_grad():
        for batch in batches:
            if not batch.target_count:
                continue
            batch = batch.to(decoder.device)
            with precision.autocast(str(decoder.device)):
                hidden = decoder(batch.ids, step_inputs(batch))
                losses = token_losses(decoder, hidden, batch.targets)
            rows, counts = losses.double().sum(1).tolist(), (batch.targets != IGNORE).sum(1).tolist()
            tongues = [-1] * len(rows) if batch.languages is None else batch.languages.tolist()
            for tongue, loss, count in zip(tongues, rows, counts, strict=True):
                total = sums.setdefault(tongue, [0.0, 0.0])
                total[0] += loss
                total[1] += count
    result = _figures(sum(s[0] for s in sums.values()), sum(s[1] for s in sums.values()))
    named = {languages[t] if t < len(languages) else str(t): _figures(*s) for t, s in sorted(sums.items()) if t >= 0}
    return result | ({"languages": named} if named else {})


def _figures(loss: float, targets: float) -> dict[str, Any]:
    if not targets:
        return {"loss": None, "perplexity": None, "targets": 0}
    mean = loss / targets
    return {"loss": mean, "perplexity": exp(min(mean, _MOST)), "targets": int(targets)}
