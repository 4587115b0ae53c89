"""Sophia-G (Liu et al. 2023, algorithms 2 and 3): state twice the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import UsageError
from plait.training.optimizers.base import GroupSpec, RoleOptimizer
from plait.training.optimizers.pieces import Moved
from plait.training.optimizers.rules import Numbers, Rule, average, common
from plait.training.optimizers.settings import UNDECAYED, not_negative, positive, two_shares, whole
from plait.training.roles import DECAYED, Described


class SophiaRule(Rule):
    """m = b1 m + (1 - b1) g, p = (1 - lr wd) p - lr sign(m) min(|m| / (rho bs h + eps), 1)

    Measures how many numbers of a piece are not clipped.
    """

    name = "sophia"
    states = ("exp_avg", "hessian")

    def numbers(self, group: Mapping[str, Any], steps: np.ndarray) -> Numbers:
        return {**common(group), "eps": group["eps"], "extra": group["rho"] * group["positions"]}

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: Sequence[list[Tensor]], n: Numbers
    ) -> list[Tensor]:
        m, h = states
        average(m, gradients, n["beta1"], n["rest1"])
        divisors = torch._foreach_mul(h, n["extra"])
        torch._foreach_add_(divisors, n["eps"])
        ratios = torch._foreach_abs(m)
        torch._foreach_div_(ratios, divisors)
        unclipped = [(ratio < 1).sum() for ratio in ratios]
        torch._foreach_clamp_max_(ratios, 1.0)
        torch._foreach_mul_(ratios, torch._foreach_sign(m))
        torch._foreach_mul_(parameters, n["decay"])
        torch._foreach_add_(parameters, ratios, alpha=-n["rate"])
        return unclipped


class SophiaOptimizer(RoleOptimizer):
    """Sophia-G. h, the curvature, comes from backward passes of their own:

    every `hessian_interval` steps, after `step()` and `zero_grad()`, draw a label from the model's distribution at
    every position that has a target, take the backward of the mean cross-entropy over them, unscaled and unclipped,
    then call `update_hessian(number of positions drawn)` and `zero_grad()`. Until the first time h is 0 and a step
    moves every number by the rate (a sign step).

    skipped_refreshes: how many found a gradient that is not finite.
    """

    skipped_refreshes = 0

    def __init__(self, described: list[Described], specs: list[GroupSpec]) -> None:
        super().__init__(described, specs)
        self._unclipped: list[Any] = []
        self._numbers = 0

    def wants_hessian(self, step: int) -> bool:
        """Whether h is to be refreshed now. step: steps made so far."""
        return step > 0 and step % self.param_groups[0]["hessian_interval"] == 0

    @torch.no_grad()
    def update_hessian(self, batch_positions: int) -> bool:
        """h = b2 h + (1 - b2) g^2 with the gradients as they are, which it leaves to be cleared.

        batch_positions: how many labels were drawn in the whole step, over all micro-batches; the steps until the next
        refresh use it as bs. Experts that got no token keep their h. Returns False, having changed nothing, where a
        gradient is not finite (an overflow in fp16). Raises UsageError for less than one position.
        """
        if batch_positions < 1:
            raise UsageError(f"a refresh of the curvature needs drawn positions, not {batch_positions}")
        found = []
        for index, group in enumerate(self.param_groups):
            moved = self._pieces[index].begin(self.state, advance=False)
            h = moved.views([self.state[d.parameter]["hessian"] for d in self._members[index]])
            found.append((group["betas"][1], moved.views(moved.gradients), h))
        norms = [norm for _, gradients, _ in found if gradients for norm in torch._foreach_norm(gradients)]
        if norms and not torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all():
            self.skipped_refreshes += 1
            return False
        for beta2, gradients, h in found:
            if h:
                torch._foreach_mul_(h, beta2)
                torch._foreach_addcmul_(h, gradients, gradients, value=1 - beta2)
        for group in self.param_groups:
            group["positions"] = int(batch_positions)
        return True

    def step(self, closure: Any = None) -> Any:
        self._unclipped, self._numbers = [], 0
        return super().step(closure)

    def unclipped_share(self) -> float | None:
        """Of the numbers that the last step moved the share whose |m| / (rho bs h + eps) was below 1; None before."""
        return float(sum(float(count) for count in self._unclipped)) / self._numbers if self._numbers else None

    def _take_measured(self, rule: str, moved: Moved, measured: Sequence[Any]) -> None:
        self._unclipped += list(measured)
        self._numbers += int(moved.count.sum())


@dataclass(frozen=True)
class Sophia:
    """Hyperparameters of Sophia-G. The default rate is ours; the rest are the authors'."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.965, 0.99)
    rho: float = 0.04
    eps: float = 1e-15
    weight_decay: float = 0.1
    hessian_interval: int = 10

    def __post_init__(self) -> None:
        not_negative(lr=self.lr, weight_decay=self.weight_decay)
        positive(rho=self.rho, eps=self.eps)
        two_shares(betas=self.betas)
        whole(hessian_interval=self.hessian_interval)

    def build(self, described: list[Described]) -> SophiaOptimizer:
        return SophiaOptimizer(described, self.groups())

    def groups(self) -> list[GroupSpec]:
        numbers = {
            "betas": tuple(self.betas),
            "rho": self.rho,
            "eps": self.eps,
            "hessian_interval": self.hessian_interval,
            "positions": 0,  # bs: of the last refresh
        }
        return [
            GroupSpec("decayed", DECAYED, SophiaRule(), self.lr, self.weight_decay, numbers),
            GroupSpec("undecayed", UNDECAYED, SophiaRule(), self.lr, 0.0, numbers),
        ]
