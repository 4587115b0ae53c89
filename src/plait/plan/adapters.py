"""LoRA adapters for native plans: their matrices packed as the kernels read them, and given to plans. No torch.

The products that one operation of a plan makes of one input (q, k and v) have their A's in one matrix, so that the
input is read once. The scale is part of B. Beside quantised weights, whose activations have 8 bits, fp32 matrices are
kept in fp16: reading them is what an adapter costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError
from plait.kernels import abi
from plait.plan.lowered import Lowered, MatrixRef
from plait.plan.native_plan import NativePlan
from plait.weights.adapters import Adapter
from plait.weights.fill import Source, fill
from plait.weights.numbers import rounded
from plait.weights.store import PackedWeight, aligned_bytes, need_library, packed_bytes

# Products of which an operation makes one or more; their matrices are every second one of `w`.
_PRODUCTS = ("linear", "gated", "activated")
Group = tuple[MatrixRef, ...]


@dataclass(frozen=True)
class _Site:
    """What one adapter adds to one group of products. first: columns of a's result that each b reads from."""

    a: PackedWeight
    b: tuple[PackedWeight | None, ...]
    first: tuple[int, ...]


class PackedAdapters:
    """Adapters 1, 2, ... for any plan of one model. groups: those of its plans (`groups_of`); the adapters' own numbers
    are not needed afterwards. half: fp32 is to become fp16 where that costs no more than 2^-9 of a matrix."""

    def __init__(self, adapters: Sequence[Adapter], groups: Iterable[Group], half: bool = False) -> None:
        self.names = [adapter.name for adapter in adapters]
        self._targets = [frozenset(adapter.targets) for adapter in adapters]
        self._sites: list[dict[Group, _Site]] = []
        known = self._groups = dict.fromkeys(groups)
        for adapter in adapters:
            packed: dict[MatrixRef, PackedWeight] = {}
            self._sites.append(
                {
                    group: _pack(adapter, group, packed, half)
                    for group in known
                    if any(r.name in adapter.targets for r in group)
                }
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices."""
        weights = {
            id(weight): weight.nbytes
            for sites in self._sites
            for site in sites.values()
            for weight in (site.a, *site.b)
            if weight is not None
        }
        return sum(weights.values())

    def check(self, plan: NativePlan) -> None:
        """UsageError for one that changes what the plan computes without native kernels."""
        there = {ref.name for group in groups_of(plan.lowered).values() for ref in group}
        for name, targets in zip(self.names, self._targets, strict=True):
            foreign = sorted(targets - there)
            if foreign:
                raise UsageError(
                    f"adapter {name} changes {foreign[0]}, which has no native kernel here: use --plan reference"
                )

    def give(self, plan: NativePlan) -> None:
        """Make them the plan's, or raise as `check` does. The plan's groups are among those given at first."""
        self.check(plan)
        groups = groups_of(plan.lowered)
        assert self._groups.keys() >= set(groups.values()), "a plan with products that the adapters were not packed for"
        for number, sites in enumerate(self._sites, 1):
            plan.set_adapter(number, [_struct(op, sites[group]) for op, group in groups.items() if group in sites])


def groups_of(lowered: Lowered) -> dict[int, Group]:
    """The matrices of every operation of a plan that makes products, by its number."""
    groups = {}
    for number, op in enumerate(lowered.ops):
        if op.kind in _PRODUCTS:
            count = op.i[0] if op.kind == "linear" else len(op.w) // 2
            groups[number] = tuple(lowered.matrices[w] for w in op.w[: 2 * count : 2])
    return groups


def _pack(adapter: Adapter, group: Group, packed: dict[MatrixRef, PackedWeight], half: bool) -> _Site:
    """packed: B's of this adapter that other groups have had packed."""
    rows: list[NDArray[np.float32]] = []
    first: list[int] = []
    second: list[PackedWeight | None] = []
    storages = set()
    column = 0
    for ref in group:
        target = adapter.targets.get(ref.name)
        first.append(column)
        if target is None:
            second.append(None)
            continue
        rows.append(target.a)
        storages.add(target.storage)
        column += target.rank
        if ref not in packed:
            b = target.b if ref.rows is None else target.b[ref.rows[0] : ref.rows[1]]
            packed[ref] = _packed(b * np.float32(target.scale), target.storage, half)
        second.append(packed[ref])
    storage = storages.pop() if len(storages) == 1 else "F32"
    return _Site(_packed(np.concatenate(rows), storage, half), tuple(second), tuple(first))


def _packed(values: NDArray[np.float32], storage: str, half: bool) -> PackedWeight:
    values = np.ascontiguousarray(values, np.float32)
    layout = _layout(values, storage, half)
    weight = PackedWeight("", values.shape, layout, aligned_bytes(packed_bytes(layout, values.shape)))
    fill(weight, Source("F32", values.ctypes.data, 4 * values.shape[1]), None, need_library().threads())
    return weight


def _layout(values: NDArray[np.float32], storage: str, half: bool) -> str:
    """That of the file, where it holds the numbers exactly (the scale may be no power of two)."""
    if storage != "F32" and np.array_equal(rounded(values, storage), values):
        return storage
    if half:
        error = np.linalg.norm(rounded(values, "F16") - values)
        if error <= 2.0**-9 * np.linalg.norm(values):
            return "F16"
    return "F32"


def _struct(op: int, site: _Site) -> abi.AdapterSite:
    struct = abi.AdapterSite(op=op, a=site.a.matrix())
    for k, (weight, first) in enumerate(zip(site.b, site.first, strict=True)):
        if weight is not None:
            struct.b[k] = weight.matrix()
            struct.first[k] = first
    return struct
