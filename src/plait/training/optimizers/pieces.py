"""The pieces of a parameter group, and which of them a step moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import UsageError
from plait.training.roles import Described


@dataclass(frozen=True)
class Moved:
    """What a step moves of one group: of every piece the parameter's index in the group, the place and length in the
    parameter's memory (in numbers), and the number of the step that this is for it, from 1.

    gradients: of every parameter, float32 and contiguous, None where there is none.
    """

    owner: np.ndarray
    start: np.ndarray
    count: np.ndarray
    steps: np.ndarray
    gradients: list[Tensor | None]

    def select(self, chosen: np.ndarray) -> Moved:
        """Of the pieces those that are chosen, bool [pieces]."""
        return Moved(self.owner[chosen], self.start[chosen], self.count[chosen], self.steps[chosen], self.gradients)

    def views(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """A flat view per piece of tensors of the parameters' shapes."""
        flat = [None if t is None else t.view(-1) for t in tensors]
        places = zip(self.owner.tolist(), self.start.tolist(), self.count.tolist(), strict=True)
        return [_found(flat[owner]).narrow(0, start, count) for owner, start, count in places]


class Pieces:
    """How a group's parameters are cut. by_matrix: into matrices, else into experts; what is neither stays whole."""

    def __init__(self, described: Sequence[Described], by_matrix: bool) -> None:
        self._described = list(described)
        pieces = np.array([d.matrices if by_matrix else d.experts for d in described], dtype=np.int64)
        experts = np.array([d.experts for d in described], dtype=np.int64)
        sizes = np.array([d.parameter.numel() for d in described], dtype=np.int64)
        self._owner = np.repeat(np.arange(len(pieces)), pieces)
        number = np.arange(len(self._owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._count = np.repeat(sizes // np.maximum(pieces, 1), pieces)
        self._start = number * self._count
        # Where a piece's count of steps stands among those of all parameters: experts of one parameter side by side.
        first = np.cumsum(experts) - experts
        self._slot = first[self._owner] + number * experts[self._owner] // pieces[self._owner]

    def begin(self, state: Mapping[Tensor, dict[str, Any]], advance: bool = True) -> Moved:
        """The pieces that have a gradient and whose experts are not idle; advance: their steps are counted.

        state: of every parameter; its "step" is an int64 tensor with a count per expert. Raises UsageError for
        gradients and `active_experts` that do not fit.
        """
        gradients = [gradient_of(d) for d in self._described]
        active, steps = [], []
        for d, gradient in zip(self._described, gradients, strict=True):
            chosen = np.zeros(d.experts, bool) if gradient is None else active_experts(d)
            counts = state[d.parameter]["step"].numpy()
            if advance:
                counts += chosen
            active.append(chosen)
            steps.append(counts)
        if not active:
            return Moved(self._owner, self._start, self._count, np.zeros(0), [])
        chosen = np.concatenate(active)[self._slot]
        now = np.concatenate(steps).astype(np.float64)[self._slot]
        return Moved(self._owner, self._start, self._count, now, gradients).select(chosen)


def gradient_of(described: Described) -> Tensor | None:
    """A parameter's gradient in float32, contiguous; the tensor itself where it is so already."""
    parameter, gradient = described.parameter, described.parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise UsageError(f"{described.name} has a sparse gradient: only dense ones are supported")
    if gradient.shape != parameter.shape or gradient.device != parameter.device:
        raise UsageError(
            f"the gradient of {described.name} is {tuple(gradient.shape)} on {gradient.device},"
            f" its parameter {tuple(parameter.shape)} on {parameter.device}"
        )
    return gradient.to(torch.float32).contiguous()


def active_experts(described: Described) -> np.ndarray:
    """Which experts of a stack got a token in this step, bool [experts]: `parameter.active_experts`, all where None."""
    active = getattr(described.parameter, "active_experts", None)
    if active is None:
        return np.ones(described.experts, bool)
    if not isinstance(active, Tensor) or active.dtype != torch.bool or active.shape != (described.experts,):
        raise UsageError(f"{described.name}: active_experts must be a bool tensor of {described.experts} experts")
    return active.cpu().numpy()


def _found(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
