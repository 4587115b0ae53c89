"""A recorded forward: a list of operations in static single assignment form, as plain JSON.

No callables, no tensors, no torch: weights are named, values are numbered. Executors (the interpreter, later the native
plan) read this and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from plait.errors import RecordingError
from plait.ops.spec import LayerCache

FORMAT = 1
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Value:
    """A value of the list. shape: integers and the symbols N (tokens), S (sequences), R (logit rows).

    dtype: "compute" (the model's), "f32", "i64" or "i32". layout: how the numbers lie in memory ("rows": row-major).
    """

    shape: Shape
    dtype: str = "compute"
    layout: str = "rows"


@dataclass(frozen=True)
class WeightRef:
    """A weight by name. rows: the slice (start, stop) of axis 0 that is meant, None for all of it.

    format: dense dtype or quantised block type; layout: "file" (as loaded) or a packed kernel layout; version grows
    when a live parameter changes.
    """

    name: str
    shape: tuple[int, ...]
    format: str = "f32"
    layout: str = "file"
    rows: tuple[int, int] | None = None
    version: int = 0


@dataclass(frozen=True)
class Op:
    """One operation: inputs and outputs are value numbers, a weight that is absent (no bias) is None."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[WeightRef | None, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """inputs, outputs: name -> value number. caches: what each layer keeps per token, for building a memory."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: dict[str, int]
    outputs: dict[str, int]
    caches: tuple[LayerCache, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)

    def weights(self) -> Iterator[WeightRef]:
        """Every weight once, in order of first use."""
        seen = set()
        for op in self.ops:
            for ref in op.weights:
                if ref is not None and ref.name not in seen:
                    seen.add(ref.name)
                    yield ref

    def last_uses(self) -> list[tuple[int, ...]]:
        """Per operation, the values that nothing reads afterwards (their buffers are free from there on)."""
        last: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for value in (*op.inputs, *op.outputs):
                last[value] = index
        keep = set(self.outputs.values())
        ends: list[list[int]] = [[] for _ in self.ops]
        for value, index in last.items():
            if value not in keep:
                ends[index].append(value)
        return [tuple(e) for e in ends]

    def to_json(self) -> str:
        document = {
            "format": FORMAT,
            "model": self.model,
            "values": [[list(v.shape), v.dtype, v.layout] for v in self.values],
            "inputs": self.inputs,
            "outputs": self.outputs,
            "caches": [[c.num_kv_heads, c.key_width, c.value_width, c.window] for c in self.caches],
            "ops": [
                {
                    "name": op.name,
                    "inputs": list(op.inputs),
                    "outputs": list(op.outputs),
                    "weights": [
                        w and [w.name, list(w.shape), w.format, w.layout, w.rows, w.version] for w in op.weights
                    ],
                    "attrs": op.attrs,
                }
                for op in self.ops
            ],
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """Read what `to_json` wrote. Raises RecordingError for another format version."""
        data = json.loads(text)
        if data.get("format") != FORMAT:
            raise RecordingError(f"recording has format {data.get('format')!r}; this version reads {FORMAT}")
        ops = tuple(
            Op(
                op["name"],
                tuple(op["inputs"]),
                tuple(op["outputs"]),
                tuple(w and _weight(w) for w in op["weights"]),
                op["attrs"],
            )
            for op in data["ops"]
        )
        values = tuple(Value(tuple(shape), dtype, layout) for shape, dtype, layout in data["values"])
        caches = tuple(LayerCache(*c) for c in data["caches"])
        return cls(values, ops, data["inputs"], data["outputs"], caches, data["model"])


def _weight(data: list[Any]) -> WeightRef:
    name, shape, form, layout, rows, version = data
    return WeightRef(name, tuple(shape), form, layout, rows and tuple(rows), version)
