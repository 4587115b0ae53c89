"""The optimisers' one-pass kernels of the native library: every piece of a step in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from plait.errors import PlaitError
from plait.kernels import native
from plait.kernels.abi import RULES, Update
from plait.training.optimizers.pieces import Moved
from plait.training.optimizers.rules import NAMES, Numbers

_UPDATE = np.dtype(Update)


def fits(tensor: Tensor) -> bool:
    """Whether the library moves it: float32 in this machine's memory, contiguous, and there is a library."""
    cpu = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
    return cpu and native.native_library() is not None


class Batch:
    """The pieces of one step."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, Moved, np.ndarray]] = []

    def add(self, rule: str, moved: Moved, tensors: Sequence[Sequence[Tensor]], numbers: Numbers) -> None:
        """tensors: of every parameter of the group what is moved, then its states. They must live until `run`."""
        updates = np.zeros(len(moved.owner), _UPDATE)
        updates["rule"] = RULES[rule]
        updates["count"] = moved.count
        updates["parameter"] = _addresses(tensors[0], moved)
        updates["gradient"] = _addresses(moved.gradients, moved)
        for k, state in enumerate(tensors[1:]):
            updates["state"][:, k] = _addresses(state, moved)
        for name in NAMES:
            if name in numbers:
                updates[name] = numbers[name]
        self._parts.append((rule, moved, updates))

    def run(self) -> list[tuple[str, Moved, np.ndarray]]:
        """Makes the step. Returns of every `add` the rule, the pieces and what was measured of them."""
        if not self._parts:
            return []
        library = native.native_library()
        assert library is not None
        library.isa()  # raises where PLAIT_ISA names what this CPU cannot run
        updates = np.concatenate([part for _, _, part in self._parts])
        if library.functions.plait_optimise(None, updates.ctypes.data, len(updates)) != 0:
            raise PlaitError(f"the optimiser's kernel refused the step: {library.last_error()}")
        ends = np.cumsum([len(part) for _, _, part in self._parts])[:-1]
        measured = np.split(updates["measured"], ends)
        return [(rule, moved, m) for (rule, moved, _), m in zip(self._parts, measured, strict=True)]


def _addresses(tensors: Sequence[Tensor | None], moved: Moved) -> np.ndarray:
    first = np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    return first[moved.owner] + (4 * moved.start).astype(np.uint64)
