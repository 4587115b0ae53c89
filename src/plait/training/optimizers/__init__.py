"""The five optimisers. Each has a file with its rule and its hyperparameters, and an entry in OPTIMIZERS."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from torch import nn

from plait.errors import UsageError
from plait.training.optimizers.adamw import AdamW
from plait.training.optimizers.base import RoleOptimizer
from plait.training.optimizers.lion import Lion
from plait.training.optimizers.mars import Mars
from plait.training.optimizers.muon import Muon
from plait.training.optimizers.report import state_bytes, table
from plait.training.optimizers.sophia import Sophia
from plait.training.roles import describe_parameters

__all__ = ["OPTIMIZERS", "RoleOptimizer", "build_optimizer", "state_bytes", "table"]

OPTIMIZERS: dict[str, type[Any]] = {"adamw": AdamW, "mars": Mars, "lion": Lion, "muon": Muon, "sophia": Sophia}


def build_optimizer(name: str, decoder: nn.Module, **hyperparameters: Any) -> RoleOptimizer:
    """The optimiser of a decoder's trainable parameters, in groups by role.

    name: adamw, mars, lion, muon or sophia. hyperparameters: fields of its settings (`OPTIMIZERS[name]`), with
    their defaults where absent. Build it after the decoder is on its device. Raises UsageError for an unknown name
    or hyperparameter, with the nearest known one, and for a value out of range.
    """
    settings = _known("optimiser", name, OPTIMIZERS)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    for key in hyperparameters:
        _known(f"hyperparameter of {name}", key, fields)
    return settings(**hyperparameters).build(describe_parameters(decoder))


def _known(what: str, name: str, table: dict[str, Any]) -> Any:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"unknown {what} {name!r}{hint} (known: {', '.join(sorted(table))})")
