"""Lion (Chen et al. 2023, algorithm 2): state as large as the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.training.optimizers.base import GroupSpec, RoleOptimizer
from plait.training.optimizers.rules import Numbers, Rule, average, common
from plait.training.optimizers.settings import UNDECAYED, not_negative, two_shares
from plait.training.roles import DECAYED, Described


class LionRule(Rule):
    """p = (1 - lr wd) p - lr sign(b1 m + (1 - b1) g), m = b2 m + (1 - b2) g"""

    name = "lion"
    states = ("exp_avg",)

    def numbers(self, group: Mapping[str, Any], steps: np.ndarray) -> Numbers:
        return common(group)

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: Sequence[list[Tensor]], n: Numbers
    ) -> None:
        m = states[0]
        signs = list(torch._foreach_mul(m, n["beta1"]))
        torch._foreach_add_(signs, gradients, alpha=n["rest1"])
        torch._foreach_sign_(signs)
        torch._foreach_mul_(parameters, n["decay"])
        torch._foreach_add_(parameters, signs, alpha=-n["rate"])
        average(m, gradients, n["beta2"], n["rest2"])


@dataclass(frozen=True)
class Lion:
    """Hyperparameters of Lion: its steps are as long in every number, so it wants a small rate and a large decay."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.3

    def __post_init__(self) -> None:
        not_negative(lr=self.lr, weight_decay=self.weight_decay)
        two_shares(betas=self.betas)

    def build(self, described: list[Described]) -> RoleOptimizer:
        return RoleOptimizer(described, self.groups())

    def groups(self) -> list[GroupSpec]:
        numbers = {"betas": tuple(self.betas)}
        return [
            GroupSpec("decayed", DECAYED, LionRule(), self.lr, self.weight_decay, numbers),
            GroupSpec("undecayed", UNDECAYED, LionRule(), self.lr, 0.0, numbers),
        ]
