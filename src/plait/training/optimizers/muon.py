"""Muon (Jordan 2024): matrices inside the layers move by orthogonalised momentum, everything else by AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.training.optimizers import native
from plait.training.optimizers.adamw import AdamWRule
from plait.training.optimizers.base import GroupSpec, RoleOptimizer
from plait.training.optimizers.orthogonal import ITERATIONS, coefficients, orthogonalise
from plait.training.optimizers.pieces import Moved
from plait.training.optimizers.rules import Numbers, Rule
from plait.training.optimizers.settings import (
    UNDECAYED,
    not_negative,
    one_of,
    positive,
    shares,
    switch,
    two_shares,
    whole,
)
from plait.training.roles import Described, Role

MATRICES: tuple[Role, ...] = ("matrix", "expert_stack")
OTHERS: tuple[Role, ...] = ("embedding", "head", "router")
SCALES = ("original", "match_rms_adamw")
PRECISIONS = ("auto", "fp32", "bf16")


class MuonRule(Rule):
    """b = mu b + g, x = g + mu b (Nesterov) or b, p = (1 - lr wd) p - lr s O(x)

    O: the iteration of plait.training.optimizers.orthogonal. s: sqrt(max(1, rows / columns)) ("original") or
    0.2 sqrt(max(rows, columns)) ("match_rms_adamw": the size of AdamW's steps, Liu et al. 2025).
    """

    name = "muon"
    states = ("momentum_buffer",)
    by_matrix = True

    def numbers(self, group: Mapping[str, Any], steps: np.ndarray) -> Numbers:
        return {"decay": 1 - group["lr"] * group["weight_decay"], "rate": group["lr"]}


@dataclass
class Matrix:
    """A matrix [rows, columns] that is orthogonalised as one: a piece, or those of q, k and v one below another."""

    pieces: list[int]
    rows: int
    columns: int


class MuonOptimizer(RoleOptimizer):
    """Muon. Every weight matrix is a matrix of its own, every expert's too, and of gated experts the gate's and the
    other half's, as they are where experts are not stacked; `fuse_qkv` joins q, k and v of an attention."""

    def _step_group(self, index: int, batch: native.Batch) -> None:
        if not isinstance(self._rules[index], MuonRule):
            super()._step_group(index, batch)
            return
        group, members = self.param_groups[index], self._members[index]
        moved = self._pieces[index].begin(self.state)
        matrices = join(members, moved, group["fuse_qkv"])
        parameters, momenta = (moved.views(kind) for kind in self._tensors(index))
        gradients = moved.views(moved.gradients)
        by_shape: dict[Any, list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.rows, matrix.columns, parameters[matrix.pieces[0]].device].append(matrix)
        for (rows, columns, device), alike in by_shape.items():
            some = [piece for matrix in alike for piece in matrix.pieces]
            directions = _momentum(group, [momenta[i] for i in some], [gradients[i] for i in some])
            stacked = torch.cat(directions).view(len(alike), rows, columns)
            steps = coefficients(group["iteration"], group["ns_steps"])
            made = orthogonalise(stacked, steps, _dtype(group["precision"], device)).to(torch.float32)
            updates = made.reshape(-1).split([parameters[i].numel() for i in some])
            factor = group["lr"] * scale_of(group["scale"], rows, columns)
            torch._foreach_mul_([parameters[i] for i in some], 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_([parameters[i] for i in some], list(updates), alpha=-factor)


def join(members: list[Described], moved: Moved, fuse_qkv: bool) -> list[Matrix]:
    """The matrices of a step's pieces."""
    matrices: list[Matrix] = []
    joints: dict[str, Matrix] = {}
    for piece, (owner, count) in enumerate(zip(moved.owner.tolist(), moved.count.tolist(), strict=True)):
        d = members[owner]
        columns = d.parameter.shape[-1]
        rows = count // columns
        joint = joints.get(d.joint) if fuse_qkv and d.joint else None
        if joint is not None:
            joint.pieces.append(piece)
            joint.rows += rows
            continue
        matrices.append(Matrix([piece], rows, columns))
        joints[d.joint] = matrices[-1]
    return matrices


def scale_of(scale: str, rows: int, columns: int) -> float:
    """What the orthogonalised direction is multiplied with, beside the rate."""
    return sqrt(max(1, rows / columns)) if scale == "original" else 0.2 * sqrt(max(rows, columns))


def _momentum(group: Mapping[str, Any], momenta: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Advances the momenta; returns what is to be orthogonalised."""
    torch._foreach_mul_(momenta, group["momentum"])
    torch._foreach_add_(momenta, gradients)
    return list(torch._foreach_add(gradients, momenta, alpha=group["momentum"])) if group["nesterov"] else momenta


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    """bf16 where it is asked for, or where the device multiplies it fast (CUDA from compute capability 8.0)."""
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and fast) else torch.float32


@dataclass(frozen=True)
class Muon:
    """Hyperparameters of Muon; `adamw_...` are those of embedding, head, routers, norms, biases and single numbers.

    iteration: newton_schulz or polar_express. scale: original or match_rms_adamw (which wants AdamW's rates).
    fuse_qkv: q, k and v of an attention as one matrix. precision of the products: auto (bf16 where the device is fast
    with it), fp32 or bf16.
    """

    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    iteration: str = "newton_schulz"
    scale: str = "original"
    fuse_qkv: bool = False
    precision: str = "auto"
    weight_decay: float = 0.1
    adamw_lr: float = 3e-3
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    adamw_weight_decay: float = 0.1

    def __post_init__(self) -> None:
        not_negative(lr=self.lr, weight_decay=self.weight_decay)
        not_negative(adamw_lr=self.adamw_lr, adamw_weight_decay=self.adamw_weight_decay)
        shares(momentum=self.momentum)
        two_shares(adamw_betas=self.adamw_betas)
        positive(adamw_eps=self.adamw_eps)
        whole(ns_steps=self.ns_steps)
        switch(nesterov=self.nesterov, fuse_qkv=self.fuse_qkv)
        one_of(ITERATIONS, iteration=self.iteration)
        one_of(SCALES, scale=self.scale)
        one_of(PRECISIONS, precision=self.precision)

    def build(self, described: list[Described]) -> MuonOptimizer:
        return MuonOptimizer(described, self.groups())

    def groups(self) -> list[GroupSpec]:
        names = ("momentum", "nesterov", "ns_steps", "iteration", "scale", "fuse_qkv", "precision")
        numbers = {"betas": tuple(self.adamw_betas), "eps": self.adamw_eps}
        decay = self.adamw_weight_decay
        return [
            GroupSpec(
                "matrices",
                MATRICES,
                MuonRule(),
                self.lr,
                self.weight_decay,
                {name: getattr(self, name) for name in names},
            ),
            GroupSpec("others", OTHERS, AdamWRule(), self.adamw_lr, decay, numbers),
            GroupSpec("undecayed", UNDECAYED, AdamWRule(), self.adamw_lr, 0.0, numbers),
        ]
