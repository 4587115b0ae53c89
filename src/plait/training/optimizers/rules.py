"""How a rule moves the pieces of a group. An optimiser's own file has its rule; this one has what they share.

A piece is a stretch of a parameter that goes its own way: with a count of its own steps, and for some rules with a
norm of its own. An ordinary parameter is one piece, a stack of experts one per expert or per matrix. The rule states
its numbers once, in float64; csrc/optimizers.cpp and `update` below both take them from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

Numbers = dict[str, Any]  # name -> a float, or a float64 array with a number per piece
# The numbers of a piece, in the order of PlaitUpdate's fields.
NAMES = ("decay", "rate", "root", "eps", "beta1", "rest1", "beta2", "rest2", "extra")


class Rule:
    """Moves parameters number by number.

    name: as the library knows it (`abi.RULES`). states: the float32 tensors that it keeps per parameter, of the
    parameter's shape, in PlaitUpdate's order. by_matrix: whether every matrix is a piece, or every expert.
    """

    name: ClassVar[str]
    states: ClassVar[tuple[str, ...]] = ()
    by_matrix: ClassVar[bool] = False

    def numbers(self, group: Mapping[str, Any], steps: np.ndarray) -> Numbers:
        """Of NAMES those that it uses. steps: float64 [pieces], of every piece the number of this step, from 1."""
        raise NotImplementedError

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: Sequence[list[Tensor]], n: Numbers
    ) -> list[Tensor] | None:
        """One step in torch: a flat float32 tensor per piece. Returns what the rule measures, a scalar per piece.

        A rule whose optimiser moves its matrices together has none (Muon).
        """
        raise NotImplementedError


def common(group: Mapping[str, Any]) -> Numbers:
    """Decoupled weight decay, the rate, and the two averages."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    decay = 1 - lr * group["weight_decay"]
    return {"decay": decay, "rate": lr, "beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2}


def average(averages: list[Tensor], values: list[Tensor], beta: float, rest: float) -> None:
    """a = beta a + rest x"""
    torch._foreach_mul_(averages, beta)
    torch._foreach_add_(averages, values, alpha=rest)
