"""Puts an adapter into a decoder's own weights: W + scale * B A, computed in fp32. For saving and converting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import UsageError, WeightError
from plait.weights.adapters import Adapter, LowRank, load_adapter

if TYPE_CHECKING:
    from torch import Tensor

    from plait.model.decoder import Decoder


def merged(weight: Tensor, target: LowRank) -> Tensor:
    """W + scale * B A for a weight [O, I], in fp32."""
    import torch

    a, b = (torch.from_numpy(x).to(weight.device) for x in (target.a, target.b))
    return torch.addmm(weight.float(), b, a, alpha=target.scale)


def merge_adapter(decoder: Decoder, adapter: Adapter | str | Path) -> Adapter:
    """Change the decoder's parameters in place, so that it computes what the adapter beside it would, and return the
    adapter. `decoder.save_pretrained` then writes a model like any other.

    adapter: what `load_adapter` gave, or the directory of one. The sum is made in fp32 and rounded to the parameter's
    dtype. Raises UsageError for a decoder whose weights are packed, else what `load_adapter` raises.
    """
    import torch

    from plait.model.record import record

    if decoder.device.type == "meta":
        raise UsageError('an adapter cannot be merged into packed weights: load the model with dtype="fp32" or "bf16"')
    if not isinstance(adapter, Adapter):
        adapter = load_adapter(adapter, decoder.config, record(decoder))
    parameters = dict(decoder.named_parameters())
    for name, target in adapter.targets.items():
        if name not in parameters or parameters[name].shape != (len(target.b), target.a.shape[1]):
            raise WeightError(f"adapter {adapter.name} changes {name}, which this model does not have in that shape")
    with torch.no_grad():
        for name, target in adapter.targets.items():
            parameters[name].copy_(merged(parameters[name], target))
    return adapter
