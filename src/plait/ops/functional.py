"""The vocabulary of the forward: one function per operation.

Each looks at its first operand. A tensor goes to the reference; a symbol is recorded. There is no global switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.ops import reference
from plait.ops.spec import AttendSpec, Pairing, RotaryTable
from plait.ops.symbolic import Symbol


def embed(ids: Any, table: Any, scale: float = 1.0, round_scale: bool = False) -> Any:
    """ids [...] -> rows of table [V, D] times scale."""
    if isinstance(ids, Symbol):
        return ids.recorder.emit("embed", (ids,), (table,), scale=scale, round_scale=round_scale)
    return reference.embed(ids, table, scale=scale, round_scale=round_scale)


def positions(position: Any, table: RotaryTable) -> Any:
    """positions [...] -> cos and sin, fp32 [..., 2, d/2]."""
    if isinstance(position, Symbol):
        return position.recorder.emit(
            "positions", (position,), inv_freq=list(table.inv_freq), magnitude=table.magnitude
        )
    return reference.positions(position, inv_freq=table.inv_freq, magnitude=table.magnitude)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x [..., I] -> x W^T + b [..., O]."""
    if isinstance(x, Symbol):
        return x.recorder.emit("linear", (x,), (weight, bias))
    return reference.linear(x, weight, bias)


def rms_norm(x: Any, weight: Any, eps: float, unit_offset: bool = False, fp32_weight: bool = False) -> Any:
    """RMS norm over the last axis."""
    if isinstance(x, Symbol):
        return x.recorder.emit("rms_norm", (x,), (weight,), eps=eps, unit_offset=unit_offset, fp32_weight=fp32_weight)
    return reference.rms_norm(x, weight, eps=eps, unit_offset=unit_offset, fp32_weight=fp32_weight)


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Layer norm over the last axis."""
    if isinstance(x, Symbol):
        return x.recorder.emit("layer_norm", (x,), (weight, bias), eps=eps)
    return reference.layer_norm(x, weight, bias, eps=eps)


def head_norm(x: Any, weight: Any, eps: float, unit_offset: bool = False, fp32_weight: bool = False) -> Any:
    """RMS norm of every head of x [..., H, d]."""
    if isinstance(x, Symbol):
        return x.recorder.emit("head_norm", (x,), (weight,), eps=eps, unit_offset=unit_offset, fp32_weight=fp32_weight)
    return reference.head_norm(x, weight, eps=eps, unit_offset=unit_offset, fp32_weight=fp32_weight)


def rotate(x: Any, angles: Any, width: int, pairing: Pairing = "halves") -> Any:
    """Rotate the first `width` features of every head of x [..., H, d]."""
    if isinstance(x, Symbol):
        return x.recorder.emit("rotate", (x, angles), width=width, pairing=pairing)
    return reference.rotate(x, angles, width=width, pairing=pairing)


def attend(q: Any, k: Any, v: Any, layer: int, spec: AttendSpec, memory: Any) -> Any:
    """Write k and v of a layer into the memory, attend with q: [..., H, dk] -> [..., H, dv]."""
    if isinstance(q, Symbol):
        return q.recorder.emit("attend", (q, k, v), layer=layer, spec=spec.to_json())
    return reference.attend(q, k, v, layer=layer, spec=spec, memory=memory)


def gate(x: Any, y: Any, kind: str) -> Any:
    """act(x) * y."""
    if isinstance(x, Symbol):
        return x.recorder.emit("gate", (x, y), kind=kind)
    return reference.gate(x, y, kind=kind)


def activate(x: Any, kind: str) -> Any:
    """act(x)."""
    if isinstance(x, Symbol):
        return x.recorder.emit("activate", (x,), kind=kind)
    return reference.activate(x, kind=kind)


def dropout(x: Any, p: float) -> Any:
    """Dropout with probability p; only called in training."""
    if isinstance(x, Symbol):
        return x.recorder.emit("dropout", (x,), p=p)
    return reference.dropout(x, p=p)


def cast(x: Any, dtype: str) -> Any:
    """x in another dtype ("f32")."""
    if isinstance(x, Symbol):
        return x.recorder.emit("cast", (x,), dtype=dtype)
    return reference.cast(x, dtype=dtype)


def view(x: Any, tail: Sequence[int], drop: int = 1) -> Any:
    """The last `drop` axes as `tail`."""
    if isinstance(x, Symbol):
        return x.recorder.emit("view", (x,), tail=list(tail), drop=drop)
    return reference.view(x, tail=tail, drop=drop)


def split(x: Any, sizes: Sequence[int]) -> Any:
    """The last axis cut into `sizes`."""
    if isinstance(x, Symbol):
        return x.recorder.emit("split", (x,), sizes=list(sizes))
    return reference.split(x, sizes=sizes)


def add(x: Any, y: Any) -> Any:
    """x + y."""
    if isinstance(x, Symbol):
        return x.recorder.emit("add", (x, y))
    return reference.add(x, y)


def scale(x: Any, factor: float) -> Any:
    """x * factor."""
    if isinstance(x, Symbol):
        return x.recorder.emit("scale", (x,), factor=factor)
    return reference.scale(x, factor=factor)


def soft_cap(x: Any, limit: float) -> Any:
    """limit * tanh(x / limit)."""
    if isinstance(x, Symbol):
        return x.recorder.emit("soft_cap", (x,), limit=limit)
    return reference.soft_cap(x, limit=limit)


def clip(x: Any, limit: float) -> Any:
    """x limited to [-limit, limit]."""
    if isinstance(x, Symbol):
        return x.recorder.emit("clip", (x,), limit=limit)
    return reference.clip(x, limit=limit)


def select_rows(x: Any, rows: Any) -> Any:
    """x [N, D], rows [R] -> [R, D]."""
    if isinstance(x, Symbol):
        return x.recorder.emit("select_rows", (x, rows))
    return reference.select_rows(x, rows)


def logits(x: Any, head: Any) -> Any:
    """x [..., D] -> fp32 [..., V]."""
    if isinstance(x, Symbol):
        return x.recorder.emit("logits", (x,), (head,))
    return reference.logits(x, head)
