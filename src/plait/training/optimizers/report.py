"""What an optimiser moves and how much it keeps, for printing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from plait.training.optimizers.base import RoleOptimizer
from plait.training.roles import ROLES


def table(optimizer: RoleOptimizer) -> list[dict[str, Any]]:
    """A row per group and role, and one for what is not trained: together they are every parameter, once.

    Keys: group, rule, role, tensors, parameters (numbers in them), lr, weight_decay; "" where there is none.
    """
    rows = []
    grouped = set()
    for group in optimizer.param_groups:
        grouped |= {id(parameter) for parameter in group["params"]}
        for role in group["roles"]:
            members = {id(parameter) for parameter in group["params"]}
            found = [d.parameter for d in optimizer.described if d.role == role and id(d.parameter) in members]
            rows.append(_row(group["name"], group["rule"], role, found, group["lr"], group["weight_decay"]))
    for role in ROLES:
        rest = [d.parameter for d in optimizer.described if d.role == role and id(d.parameter) not in grouped]
        if rest:
            rows.append(_row("not trained", "", role, rest, "", ""))
    return rows


def state_bytes(optimizer: RoleOptimizer) -> int:
    """Bytes of all tensors that the optimiser keeps beside the parameters, measured."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _row(group: str, rule: str, role: str, parameters: list[Tensor], lr: Any, weight_decay: Any) -> dict[str, Any]:
    numbers = sum(parameter.numel() for parameter in parameters)
    row = {"group": group, "rule": rule, "role": role, "tensors": len(parameters), "parameters": numbers}
    return {**row, "lr": lr, "weight_decay": weight_decay}
