"""What LoRA adapters add to the linear products of a step, in torch. What another implementation must equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.recording import WeightRef


class Factors(NamedTuple):
    """a [r, I], b [O, r], both float32: scale * (x a^T) b^T is added to x W^T."""

    a: Tensor
    b: Tensor
    scale: float


class AdaptedRows:
    """Which rows of a step have which adapter.

    adapter_of: int64 [N], of every token, 0 for none. adapters: of numbers 1, 2, ...: factors by parameter name.
    """

    def __init__(self, adapter_of: Tensor, adapters: Sequence[Mapping[str, Factors]]) -> None:
        self._count = len(adapter_of)
        self._parts = [
            (torch.nonzero(adapter_of == number).squeeze(-1), adapters[number - 1])
            for number in adapter_of.unique().tolist()
            if number
        ]

    def add(self, ref: WeightRef, x: Tensor, y: Tensor) -> Tensor:
        """y [N, O], a product of x [N, I] with the weight `ref`, with what the adapters add, computed in float32."""
        for rows, factors in self._parts:
            found = factors.get(ref.name)
            if found is None:
                continue
            assert len(x) == self._count, "adapted products have a row per token"
            b = found.b if ref.rows is None else found.b[ref.rows[0] : ref.rows[1]]
            delta = F.linear(F.linear(x[rows].float(), found.a), b) * found.scale
            y = y.index_copy(0, rows, (y[rows].float() + delta).to(y.dtype))
        return y
