"""Training: data, optimisers, schedule, precision, loop, checkpoints, evaluation.

What stands here is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.training.loss import step_loss
    from plait.training.optimizers import build_optimizer

__all__ = ["build_optimizer", "step_loss"]

_HOMES = {
    "build_optimizer": "plait.training.optimizers",
    "step_loss": "plait.training.loss",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plait.training' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
