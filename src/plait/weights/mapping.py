"""Carries out a name map: which tensors of a file fill which parameters, and the way back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.model.config import ModelConfig
from plait.model.name_map import NameMap, Rule


@dataclass(frozen=True)
class Part:
    """One of our parameters and the rows (axis 0) of the file's tensor that it consists of; None: all of them."""

    name: str
    rows: NDArray[np.int64] | None


@dataclass(frozen=True)
class Assignment:
    """A tensor of the file and what it fills. offset is added to its values on the way in."""

    file: str
    parts: tuple[Part, ...]
    offset: float = 0.0


class BoundMap:
    """A name map bound to one model."""

    def __init__(self, config: ModelConfig, names: NameMap) -> None:
        self._config = config
        self._names = names
        self._skip = [re.compile(p) for p in names.skip]

    @cached_property
    def _by_file(self) -> dict[str, tuple[Rule, int]]:
        """The file name of every rule, for every layer."""
        table = {}
        for rule in self._names.rules:
            for i in range(len(self._config.layers)) if "{i}" in rule.file else (0,):
                table[rule.file.replace("{i}", str(i))] = (rule, i)
        return table

    def incoming(self, file_names: Iterable[str], parameters: Mapping[str, tuple[int, ...]]) -> Plan:
        """Assign every name of a file. Raises WeightError naming tensors that nothing uses or that are missing."""
        assignments, skipped, unknown, used = [], [], [], set()
        for file in file_names:
            name = self._without_prefix(file)
            found = self._by_file.get(name)
            if found is not None:
                assignment = self._assign(file, *found)
            elif name in parameters:
                assignment = Assignment(file, (Part(name, None),))
            elif any(p.fullmatch(file) for p in self._skip):
                skipped.append(file)
                continue
            else:
                unknown.append(file)
                continue
            names = [part.name for part in assignment.parts]
            absent = [n for n in names if n not in parameters]
            if absent:
                unknown.append(file)
                continue
            twice = [n for n in names if n in used]
            if twice:
                raise WeightError(f"{twice[0]} would be filled twice, the second time by {file}")
            used.update(names)
            assignments.append(assignment)
        if unknown:
            raise WeightError(f"the file has {few(unknown)} that this {self._config.model_type} has no use for")
        missing = [n for n in parameters if n not in used]
        if missing:
            raise WeightError(f"the file lacks {few(missing)} that this {self._config.model_type} needs")
        return Plan(tuple(assignments), tuple(skipped))

    def file_of(self, parameter: str, file_names: Iterable[str]) -> str | None:
        """Which of these names of a file fills one of our parameters, alone; None where none does."""
        (assignment,) = self.outgoing([parameter])
        return next((name for name in file_names if self._without_prefix(name) == assignment.file), None)

    def outgoing(self, parameters: Sequence[str]) -> Iterator[Assignment]:
        """The file's tensors that our parameters make up, for export; offsets are to be subtracted."""
        made = {}
        for file, (rule, layer) in self._by_file.items():
            assignment = self._assign(file, rule, layer)
            if assignment.parts[0].name in parameters:
                made.update({part.name: assignment for part in assignment.parts})
        done = set()
        for name in parameters:
            assignment = made.get(name) or Assignment(name, (Part(name, None),))
            if assignment.file not in done:
                done.add(assignment.file)
                yield assignment

    def _assign(self, file: str, rule: Rule, layer: int) -> Assignment:
        rows = rule.rows(self._config, layer) if rule.rows else [None] * len(rule.ours)
        parts = (Part(o.replace("{i}", str(layer)), r) for o, r in zip(rule.ours, rows, strict=True))
        return Assignment(file, tuple(parts), rule.offset)

    def _without_prefix(self, name: str) -> str:
        for theirs, ours in self._names.prefixes:
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return name


@dataclass(frozen=True)
class Plan:
    """What `incoming` decided: assignments in the file's order, and the names on the skip list."""

    assignments: tuple[Assignment, ...]
    skipped: tuple[str, ...]


def few(names: Sequence[str]) -> str:
    """'a tensor x', or '7 tensors (x, y, z, ...)'."""
    if len(names) == 1:
        return f"a tensor {names[0]}"
    shown = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} tensors ({shown})"
