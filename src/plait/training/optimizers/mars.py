"""MARS, the approximate version with AdamW (Yuan et al. 2024, algorithm 2): state three times the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.training.optimizers.adamw import AdamWRule
from plait.training.optimizers.base import GroupSpec, RoleOptimizer
from plait.training.optimizers.rules import Numbers
from plait.training.optimizers.settings import UNDECAYED, not_negative, positive, switch, two_shares
from plait.training.roles import DECAYED, Described


class MarsRule(AdamWRule):
    """c = g + gamma b1 / (1 - b1) (g - g'), with norm 1 where it is longer; then AdamW on c.

    g' is the gradient of the piece's step before, as that step got it (unscaled and clipped), in a copy; in a piece's
    first step c = g. Every matrix has its own norm: of a stack every expert's, of gated experts the gate's and the
    other half's, as if they were parameters of their own. Public versions differ in what is clipped and what gamma is.
    """

    name = "mars"
    states = ("exp_avg", "exp_avg_sq", "last_grad")
    by_matrix = True

    def numbers(self, group: Mapping[str, Any], steps: np.ndarray) -> Numbers:
        n = super().numbers(group, steps)
        return {**n, "extra": np.where(steps > 1, group["gamma"] * n["beta1"] / n["rest1"], 0.0)}

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: Sequence[list[Tensor]], n: Numbers
    ) -> None:
        last = states[2]
        c = list(torch._foreach_sub(gradients, last))
        torch._foreach_mul_(c, n["extra"].tolist())
        torch._foreach_add_(c, gradients)
        torch._foreach_div_(c, [norm.clamp_min(1.0) for norm in torch._foreach_norm(c)])
        super().update(parameters, c, states, n)
        torch._foreach_copy_(last, gradients)


@dataclass(frozen=True)
class Mars:
    """Hyperparameters of MARS. optimize_1d: norms, biases and single numbers get the corrected gradient too."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.95, 0.99)
    gamma: float = 0.025
    eps: float = 1e-8
    weight_decay: float = 0.1
    optimize_1d: bool = False

    def __post_init__(self) -> None:
        not_negative(lr=self.lr, weight_decay=self.weight_decay, gamma=self.gamma)
        positive(eps=self.eps)
        two_shares(betas=self.betas)
        switch(optimize_1d=self.optimize_1d)

    def build(self, described: list[Described]) -> RoleOptimizer:
        return RoleOptimizer(described, self.groups())

    def groups(self) -> list[GroupSpec]:
        numbers = {"betas": tuple(self.betas), "eps": self.eps}
        corrected = {**numbers, "gamma": self.gamma}
        return [
            GroupSpec("decayed", DECAYED, MarsRule(), self.lr, self.weight_decay, corrected),
            GroupSpec("undecayed", UNDECAYED, MarsRule(), self.lr, 0.0, corrected)
            if self.optimize_1d
            else GroupSpec("undecayed", UNDECAYED, AdamWRule(), self.lr, 0.0, numbers),
        ]
