"""The numbers of a model with adapters merged into them, for converting; where they come from stays as it is.

Every sum is W + scale * B A in fp32, of the same operations as `plait.weights.merge`. Imports torch when it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plait.errors import PlaitError, WeightError
from plait.model.config import ModelConfig
from plait.weights.adapters import Adapter, LowRank, load_adapter
from plait.weights.arrange import PLAIN_FORMATS
from plait.weights.mapping import BoundMap, Part, few
from plait.weights.rows import Parameters, Rows, Shape

Floats = NDArray[np.float32]
Targets = Mapping[str, Sequence[LowRank]]


def load_adapters(adapters: Mapping[str, str | Path], config: ModelConfig) -> list[Adapter]:
    """Adapters by name for the model of this configuration. Raises PlaitError that names the one that does not fit."""
    from plait.model.decoder import build
    from plait.model.record import record

    recording = record(build(config, device="meta"))
    found = []
    for name, path in adapters.items():
        try:
            found.append(load_adapter(path, config, recording, name))
        except PlaitError as error:
            raise type(error)(f"adapter {name}: {error}") from None
    return found


def targets_of(adapters: Sequence[Adapter]) -> Targets:
    """What all of them add to each parameter, in their order."""
    found: dict[str, list[LowRank]] = {}
    for adapter in adapters:
        for name, target in adapter.targets.items():
            found.setdefault(name, []).append(target)
    return found


class MergedParameters:
    """`Parameters` of others, with what the targets add to them. Changed ones are float32; where they are stored as
    plain numbers, their type is still the one to write."""

    def __init__(self, parameters: Parameters, targets: Targets) -> None:
        self.shapes: Mapping[str, Shape] = parameters.shapes
        self._parameters = parameters
        self._targets = targets

    def storages(self, name: str) -> set[str]:
        found = self._parameters.storages(name)
        return {"F32"} if name in self._targets and not found <= set(PLAIN_FORMATS) else found

    def origins(self, name: str) -> set[str]:
        found = self._parameters.origins(name)
        return found or (self._parameters.storages(name) if name in self._targets else set())

    def made(self, name: str) -> bool:
        return name in self._targets or self._parameters.made(name)

    def offset(self, name: str) -> float:
        return 0.0 if name in self._targets else self._parameters.offset(name)

    def rows(self, name: str) -> Rows:
        rows = self._parameters.rows(name)
        if name not in self._targets:
            return rows
        values = _sum(rows.floats(0, len(rows.lines())), self._targets[name])
        return Rows(rows.shape, "F32", values.view(np.uint8).reshape(*rows.shape[:-1], -1))

    def release(self, name: str) -> None:
        self._parameters.release(name)


def file_changes(targets: Targets, bound: BoundMap, files: Iterable[str]) -> dict[str, Callable[[Floats], Floats]]:
    """By tensor of a file: its rows as numbers -> the same with what the targets add.

    Raises WeightError for a target that lies in none of them as it is.
    """
    changes: dict[str, Callable[[Floats], Floats]] = {}
    reached: set[str] = set()
    for file in files:
        parts = [part for part in bound.of_tensor(file).parts if part.name in targets]

        def change(values: Floats, parts: Sequence[Part] = parts) -> Floats:
            out = np.array(values, np.float32)
            for part in parts:
                rows = np.arange(len(out)) if part.rows is None else part.rows
                out[rows] = _sum(out[rows], targets[part.name])
            return out

        if parts:
            changes[file] = change
            reached.update(part.name for part in parts)
    missing = sorted(targets.keys() - reached)
    if missing:
        raise WeightError(
            f"the adapter changes {few(missing)}, which this GGUF file has in another form: convert it to a directory"
            " first"
        )
    return changes


def _sum(values: Floats, targets: Sequence[LowRank]) -> Floats:
    import torch

    from plait.weights.merge import merged

    weight = torch.from_numpy(np.array(values, np.float32))
    for target in targets:
        weight = merged(weight, target)
    out: Floats = weight.numpy()
    return out
