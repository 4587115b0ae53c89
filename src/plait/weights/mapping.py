"""Carries out a name map: which tensors of a file fill which parameters, and the way back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.model.config import MixtureSpec, ModelConfig
from plait.model.name_map import NameMap, Place, Rule

__all__ = ["Assignment", "BoundMap", "Part", "Place", "Plan", "few"]


@dataclass(frozen=True)
class Part:
    """One of our parameters and the rows (axis 0) of the file's tensor that it consists of; None: all of them.

    place: which part of the parameter, a stack [E, R, ...], those rows fill; None: the whole of it. The file's tensor
    is then [experts, rows, ...], or [rows, ...] where the place is in one expert.
    """

    name: str
    rows: NDArray[np.int64] | None
    place: Place | None = None


@dataclass(frozen=True)
class Assignment:
    """A tensor of the file and what it fills. offset is added to its values on the way in. one_row: the file has a
    vector as a matrix of one row."""

    file: str
    parts: tuple[Part, ...]
    offset: float = 0.0
    one_row: bool = False


class BoundMap:
    """A name map bound to one model."""

    def __init__(self, config: ModelConfig, names: NameMap) -> None:
        self._config = config
        self._names = names
        first, count = len(config.layers), config.next_token_layers
        after = "|".join(map(str, range(first, first + count))) if count else "(?!)"  # without any, nothing matches
        self._skip = [re.compile(p.replace("{n}", f"(?:{after})")) for p in names.skip]

    @cached_property
    def _by_file(self) -> dict[str, tuple[Rule, int, int | None]]:
        """The file name of every rule, for every layer and expert: (rule, layer, expert)."""
        return {
            rule.file.replace("{i}", str(layer)).replace("{e}", str(expert)): (rule, layer, expert)
            for rule in self._names.rules
            for layer, expert in self._uses(rule)
        }

    def _uses(self, rule: Rule) -> Iterator[tuple[int, int | None]]:
        """(layer, expert) for every tensor that a rule speaks of; the expert is None where it covers all of them."""
        if rule.when is not None and not rule.when(self._config):
            return
        for layer, spec in enumerate(self._config.layers if "{i}" in rule.file else self._config.layers[:1]):
            mixture = spec.feed_forward
            if rule.place is None:
                yield layer, None
            elif isinstance(mixture, MixtureSpec):
                experts = range(mixture.router.num_experts) if "{e}" in rule.file else (None,)
                yield from ((layer, expert) for expert in experts)

    def incoming(self, file_names: Iterable[str], parameters: Mapping[str, tuple[int, ...]]) -> Plan:
        """Assign every name of a file. Raises WeightError naming tensors that nothing uses or that are missing."""
        assignments, skipped, unknown = [], [], []
        filled = _Filled(parameters)
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
            if any(part.name not in parameters for part in assignment.parts):
                unknown.append(file)
                continue
            for part in assignment.parts:
                filled.add(file, part)
            assignments.append(assignment)
        missing = self._missing(filled, parameters)
        if unknown:
            also = f", and lacks {few(missing)} that it needs" if missing else ""
            raise WeightError(f"the file has {few(unknown)} that this {self._config.model_type} has no use for{also}")
        if missing:
            raise WeightError(f"the file lacks {few(missing)} that this {self._config.model_type} needs")
        return Plan(tuple(assignments), tuple(skipped))

    def knows(self, file: str, parameters: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a tensor of this name would fill parameters."""
        name = self._without_prefix(file)
        found = self._by_file.get(name)
        ours = [name] if found is None else [part.name for part in self._assign(file, *found).parts]
        return all(our in parameters for our in ours)

    def _missing(self, filled: _Filled, parameters: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Parameters that nothing fills; of a stack that is filled in part, the tensors that would fill the rest."""
        missing = [name for name in parameters if filled.nothing(name)]
        holes = {name for name in parameters if not filled.nothing(name) and not filled.whole(name)}
        for read_only in (False, True):  # the names of older files only where no other would fill the hole
            named: set[str] = set()
            for file, found in self._by_file.items() if holes else ():
                (part, *_) = self._assign(file, *found).parts
                if (
                    found[0].read_only == read_only
                    and part.name in holes
                    and part.place is not None
                    and filled.is_free(part.name, part.place)
                ):
                    missing.append(file)
                    named.add(part.name)
            holes -= named
        return [*missing, *sorted(holes)]

    def file_of(self, parameter: str, file_names: Iterable[str]) -> str | None:
        """Which of these names of a file fills one of our parameters, alone; None where none does."""
        (assignment,) = self.outgoing([parameter])
        return next((name for name in file_names if self._without_prefix(name) == assignment.file), None)

    def outgoing(self, parameters: Sequence[str]) -> Iterator[Assignment]:
        """The file's tensors that our parameters make up, for export; offsets are to be subtracted."""
        made: dict[str, list[Assignment]] = {}
        known = set(parameters)
        for file, found in self._by_file.items():
            assignment = self._assign(file, *found)
            if not found[0].read_only and assignment.parts[0].name in known:
                for part in assignment.parts:
                    made.setdefault(part.name, []).append(assignment)
        done = set()
        for name in parameters:
            for assignment in made.get(name) or [Assignment(name, (Part(name, None),))]:
                if assignment.file not in done:
                    done.add(assignment.file)
                    yield assignment

    def _assign(self, file: str, rule: Rule, layer: int, expert: int | None) -> Assignment:
        rows = rule.rows(self._config, layer) if rule.rows else [None] * len(rule.ours)
        place = rule.place(self._config, layer, expert) if rule.place else None
        parts = (Part(o.replace("{i}", str(layer)), r, place) for o, r in zip(rule.ours, rows, strict=True))
        return Assignment(file, tuple(parts), rule.offset, rule.one_row)

    def of_tensor(self, file: str) -> Assignment:
        """What a tensor of this name would fill, whether or not the model has such parameters."""
        name = self._without_prefix(file)
        found = self._by_file.get(name)
        return Assignment(file, (Part(name, None),)) if found is None else self._assign(file, *found)

    @property
    def prefixes(self) -> tuple[tuple[str, str], ...]:
        """(file's, ours) as the name map has them."""
        return self._names.prefixes

    def without_prefix(self, name: str) -> str:
        """A name of the file with its prefix replaced by ours."""
        return self._without_prefix(name)

    def _without_prefix(self, name: str) -> str:
        for theirs, ours in self._names.prefixes:
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return name


class _Filled:
    """Which elements of the parameters have been filled, and by which tensor of the file: each exactly once."""

    def __init__(self, parameters: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = parameters
        # Name -> expert -> (first row, last row + 1, file); a whole parameter counts as expert -1.
        self._ranges: dict[str, dict[int, list[tuple[int, int, str]]]] = {}

    def add(self, file: str, part: Part) -> None:
        """Raises WeightError, naming both files, where an element has been filled before."""
        taken = self._ranges.setdefault(part.name, {})
        if part.place is None:
            if taken:
                first = next(iter(taken.values()))[0][2]
                raise WeightError(f"{part.name} would be filled twice, by {first} and by {file}")
            taken[-1] = [(0, 0, file)]
            return
        start, stop = part.place.rows
        for expert in range(*part.place.experts):
            ranges = taken.setdefault(expert, [])
            for a, b, other in (*taken.get(-1, ()), *ranges):
                if (a, b) == (0, 0) or (start < b and a < stop):
                    raise WeightError(f"{part.name} would be filled twice, by {other} and by {file}")
            ranges.append((start, stop, file))

    def nothing(self, name: str) -> bool:
        return name not in self._ranges

    def whole(self, name: str) -> bool:
        taken = self._ranges[name]
        if -1 in taken:
            return True
        experts, rows = self._shapes[name][:2]
        return sum(b - a for ranges in taken.values() for a, b, _ in ranges) == experts * rows

    def is_free(self, name: str, place: Place) -> bool:
        """Whether no element of the place has been filled."""
        (start, stop), taken = place.rows, self._ranges.get(name, {})
        return not any(a < stop and start < b for e in range(*place.experts) for a, b, _ in taken.get(e, ()))


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
