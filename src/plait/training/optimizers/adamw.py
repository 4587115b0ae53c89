"""AdamW (Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2): state twice the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.training.optimizers.base import GroupSpec, RoleOptimizer
from plait.training.optimizers.rules import Numbers, Rule, average, common
from plait.training.optimizers.settings import UNDECAYED, not_negative, positive, two_shares
from plait.training.roles import DECAYED, Described


class AdamWRule(Rule):
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p = (1 - lr wd) p - lr m^ / (sqrt(v^) + eps)

    with m^ = m / (1 - b1^t), v^ = v / (1 - b2^t).
    """

    name = "adamw"
    states = ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Mapping[str, Any], steps: np.ndarray) -> Numbers:
        n = common(group)
        rate = n["rate"] / (1 - n["beta1"] ** steps)
        return {**n, "rate": rate, "root": (1 - n["beta2"] ** steps) ** -0.5, "eps": group["eps"]}

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: Sequence[list[Tensor]], n: Numbers
    ) -> None:
        m, v = states[:2]
        average(m, gradients, n["beta1"], n["rest1"])
        torch._foreach_mul_(v, n["beta2"])
        torch._foreach_addcmul_(v, gradients, gradients, value=n["rest2"])
        divisors = torch._foreach_sqrt(v)
        torch._foreach_mul_(divisors, n["root"].tolist())
        torch._foreach_add_(divisors, n["eps"])
        torch._foreach_mul_(parameters, n["decay"])
        torch._foreach_addcdiv_(parameters, m, divisors, (-n["rate"]).tolist())


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of AdamW."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        not_negative(lr=self.lr, weight_decay=self.weight_decay)
        positive(eps=self.eps)
        two_shares(betas=self.betas)

    def build(self, described: list[Described]) -> RoleOptimizer:
        return RoleOptimizer(described, self.groups())

    def groups(self) -> list[GroupSpec]:
        numbers = {"betas": tuple(self.betas), "eps": self.eps}
        return [
            GroupSpec("decayed", DECAYED, AdamWRule(), self.lr, self.weight_decay, numbers),
            GroupSpec("undecayed", UNDECAYED, AdamWRule(), self.lr, 0.0, numbers),
        ]
