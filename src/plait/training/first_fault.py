"""Where a number that is not finite came from: the first parameter, layer or gradient that has one."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from plait.model.decoder import Decoder, Trace
from plait.training.batch import Batch
from plait.training.loss import step_inputs, summed_cross_entropy


def value_fault(decoder: Decoder, batch: Batch) -> str | None:
    """What first goes wrong in a forward over the batch, in the order of the computation; None where nothing does."""
    for name, parameter in decoder.named_parameters():
        if not _finite(parameter):
            return f"the parameter {name} is not finite"
    trace = Trace(layers=tuple(range(len(decoder.config.layers))))
    hidden = decoder(batch.ids, step_inputs(batch), None, trace)
    for layer in trace.layers:
        if not _finite(trace.hidden_states[layer]):
            return f"layer {layer} is the first whose output is not finite"
    if not _finite(hidden):
        return "the final norm's output is not finite"
    if not _finite(summed_cross_entropy(decoder, hidden, batch.targets)):
        return "the head's logits are not finite"
    return None


def gradient_fault(decoder: Decoder) -> str | None:
    """The last layer with a gradient that is not finite: a backward goes from the head to the embedding."""
    bad = [name for name, p in decoder.named_parameters() if p.grad is not None and not _finite(p.grad)]
    if not bad:
        return None
    layers = {int(match[1]): name for name in reversed(bad) if (match := re.search(r"\.layers\.(\d+)\.", name))}
    if any("lm_head" in name for name in bad) or not layers:
        return f"the gradient of {bad[-1]} is not finite"
    last = max(layers)
    return f"the gradients of layer {last} are the first that are not finite ({layers[last]})"


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
