"""A recording as a table: operations, shapes, bytes and FLOPs. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from plait.ops.latent import expands, flops_per_key
from plait.ops.recording import Op, Recording, Shape, Value, WeightRef
from plait.ops.signatures import OPERATIONS
from plait.ops.spec import LatentSpec

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FIXED_BYTES = {"f32": 4, "i64": 8, "i32": 4}
# Attributes that a reader can see elsewhere in the row, or that are too long to print.
_HIDDEN = ("layer", "spec", "inv_freq", "tail", "drop", "sizes")
# Values that change nothing.
_NEUTRAL = (False, None, 1.0)


@dataclass(frozen=True)
class Sizes:
    """What the symbols stand for. tokens: N; sequences: S; rows: R, the rows that logits are computed for.

    length: tokens per sequence, from 0 on; leading: how N is written, such as (B, L) in training.
    """

    tokens: int
    sequences: int
    rows: int
    length: int
    leading: tuple[int, ...]

    @classmethod
    def of(cls, batch: int, length: int, training: bool = False) -> Sizes:
        """batch sequences of `length` tokens: all logits in training, the last row's of each in serving."""
        tokens = batch * length
        if training:
            return cls(tokens, batch, tokens, length, (batch, length))
        return cls(tokens, batch, batch, length, (tokens,))

    def number(self, axis: int | str) -> int:
        return axis if isinstance(axis, int) else {"N": self.tokens, "S": self.sequences, "R": self.rows}[axis]

    def shape(self, shape: Shape) -> list[int]:
        """The concrete shape; N becomes the leading axes, and R too where every row has logits."""
        out: list[int] = []
        for axis in shape:
            whole = axis == "N" or (axis == "R" and self.rows == self.tokens)
            out += self.leading if whole else (self.number(axis),)
        return out


def plan_rows(recording: Recording, number_bytes: int = 2, sizes: Sizes | None = None) -> list[dict[str, Any]]:
    """One row per operation; layers with equal operations share their rows, and `layers` lists them.

    `layers` is empty for what stands outside the layers. number_bytes: of weights and activations in the compute
    dtype. Without `sizes`, FLOPs and activation bytes are per
    token, shapes symbolic, and `flops_per_key` is what `attend` costs per visible key; with them, of the whole forward.
    """
    rows: list[dict[str, Any]] = []
    for layers, ops in _blocks(recording):
        rows += [_row(recording, op, layers, number_bytes, sizes) for op in ops]
    return rows


def totals(recording: Recording, number_bytes: int = 2, sizes: Sizes | None = None) -> dict[str, int]:
    """Sums over all operations of all layers, in the units of `plan_rows`; weight_bytes counts every weight once.

    weight_bytes_read_per_step: without the embedding, and of experts at most as many as the tokens (one, without
    `sizes`) can choose.
    """
    sums = {"flops": 0, "flops_per_key": 0, "activation_bytes": 0}
    for op in recording.ops:
        row = _row(recording, op, [], number_bytes, sizes)
        for name in sums:
            sums[name] += row[name]
    return sums | {
        "operations": len(recording.ops),
        "weight_bytes": sum(_weight_numbers(ref) * number_bytes for ref in recording.weights()),
        "weight_bytes_read_per_step": sum(
            _numbers_read(recording, op, ref, 1 if sizes is None else sizes.tokens) * number_bytes
            for op in recording.ops
            if op.name != "embed"
            for ref in op.weights
            if ref
        ),
    }


def visible_keys(length: int, window: int) -> int:
    """Sum over the queries of a sequence of the keys that each sees: causal, at most `window` (0: all)."""
    if not window or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _row(recording: Recording, op: Op, layers: list[int], number_bytes: int, sizes: Sizes | None) -> dict[str, Any]:
    inputs = [recording.values[i] for i in op.inputs]
    outputs = [recording.values[o] for o in op.outputs]
    operation = OPERATIONS[op.name]
    flops, per_key = operation.flops(inputs, op.weights, op.attrs), 0
    if sizes is not None:
        flops *= sizes.rows if "R" in outputs[0].shape else sizes.tokens
    if operation.memory:
        per_key, keys = _memory_flops(op, sizes)
        flops += per_key * keys
    moved = sum(_value_bytes(value, number_bytes, sizes) for value in (*inputs, *outputs))
    return {
        "op": op.name,
        "layers": layers,
        "inputs": [_shape(value, sizes) for value in inputs],
        "weights": [[_role(ref.name), list(ref.shape)] for ref in op.weights if ref is not None],
        "outputs": [_shape(value, sizes) for value in outputs],
        "attributes": _attributes(op),
        "flops": flops,
        "flops_per_key": per_key,
        "weight_bytes": sum(_weight_numbers(ref) * number_bytes for ref in op.weights if ref is not None),
        "activation_bytes": moved,
    }


def _memory_flops(op: Op, sizes: Sizes | None) -> tuple[int, int]:
    """(operations per token and visible key, pairs of both in the whole forward; 0 without sizes). Of latent attention
    in the form that its sequences take; without sizes, that of decoding."""
    spec, expanded = op.attrs["spec"], False
    if op.name == "attend_latent":
        latent = LatentSpec(**spec)
        expanded = latent.form == "expanded" if sizes is None else expands(sizes.length, sizes.length, latent)
    pairs = 0 if sizes is None else sizes.sequences * visible_keys(sizes.length, spec.get("window", 0))
    return flops_per_key(op.name, spec, expanded), pairs


def _blocks(recording: Recording) -> list[tuple[list[int], list[Op]]]:
    """(layers, operations) in order of first appearance; what stands outside the layers has none."""
    segments: list[tuple[int | None, list[Op]]] = []
    current: int | None = None
    for op in recording.ops:
        found = _layer_of(op, current)
        if not segments or found != current:
            segments.append((found, []))
            current = found
        segments[-1][1].append(op)
    blocks: list[tuple[list[int], list[Op], Any]] = []
    for layer, ops in segments:
        signature = (layer is None, [_signature(recording, op) for op in ops])
        known = next((block for block in blocks if layer is not None and block[2] == signature), None)
        if known is None:
            blocks.append(([] if layer is None else [layer], ops, signature))
        elif layer is not None:
            known[0].append(layer)
    return [(layers, ops) for layers, ops, _ in blocks]


def _layer_of(op: Op, current: int | None) -> int | None:
    """The layer that an operation belongs to: its weights' or its own number, else that of the one before."""
    if "layer" in op.attrs:
        return op.attrs["layer"]
    for ref in op.weights:
        if ref is not None:
            match = _LAYER.search(ref.name)
            return int(match[1]) if match else None
    return current


def _signature(recording: Recording, op: Op) -> Any:
    """What two layers must share to be printed as one."""
    values = [recording.values[i] for i in (*op.inputs, *op.outputs)]
    weights = [ref and (_role(ref.name), ref.shape, ref.format) for ref in op.weights]
    return op.name, values, weights, {k: v for k, v in op.attrs.items() if k != "layer"}


def _role(name: str) -> str:
    """A weight's name without the number of its layer."""
    return _LAYER.sub(".layers.*.", name)


def _attributes(op: Op) -> dict[str, Any]:
    """The attributes worth printing; of attention and routing, what is not in their shapes."""
    shown = {k: v for k, v in op.attrs.items() if k not in _HIDDEN and v not in _NEUTRAL}
    if op.name == "attend":
        spec = op.attrs["spec"]
        shown |= {k: spec[k] for k in ("scale", "window", "soft_cap") if spec[k]}
    if op.name == "attend_latent":
        shown |= {k: op.attrs["spec"][k] for k in ("nope_width", "rope_width", "scale", "form")}
    if op.name == "route":
        spec = op.attrs["spec"]
        shown |= {k: spec[k] for k in ("scores", "renormalise")} | (
            {"scale": spec["scale"]} if spec["scale"] != 1 else {}
        )
        shown |= {k: spec[k] for k in ("groups", "top_groups", "group_score") if spec["groups"]}
    if "inv_freq" in op.attrs:
        shown["pairs"] = len(op.attrs["inv_freq"])
    return shown


def _shape(value: Value, sizes: Sizes | None) -> list[int | str]:
    return list(value.shape) if sizes is None else list(sizes.shape(value.shape))


def _value_bytes(value: Value, number_bytes: int, sizes: Sizes | None) -> int:
    """Bytes of a value: of one token's share, or of the whole forward."""
    numbers = prod(axis for axis in value.shape if isinstance(axis, int))
    if sizes is not None:
        numbers *= prod(sizes.number(axis) for axis in value.shape if isinstance(axis, str))
    return numbers * _FIXED_BYTES.get(value.dtype, number_bytes)


def _weight_numbers(ref: WeightRef) -> int:
    if ref.rows is None:
        return prod(ref.shape)
    return (ref.rows[1] - ref.rows[0]) * prod(ref.shape[1:])


def _numbers_read(recording: Recording, op: Op, ref: WeightRef, tokens: int) -> int:
    numbers = _weight_numbers(ref)
    if op.name != "experts":
        return numbers
    chosen = recording.values[op.inputs[1]].shape[-1]
    assert isinstance(chosen, int)
    return numbers // ref.shape[0] * min(ref.shape[0], tokens * chosen)


def shape_text(shapes: Sequence[Sequence[int | str]]) -> str:
    """'[N, 8, 64] [N, 2, 64]'."""
    return " ".join("[" + ", ".join(map(str, shape)) + "]" for shape in shapes)
