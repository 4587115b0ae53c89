"""The vocabulary of the forward: one function per operation, `function(operands, weights, **attributes)`.

Each looks at its first operand. A tensor goes to the reference; a symbol is recorded. There is no global switch.
What each takes and gives stands in plait.ops.signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from plait.ops import reference
from plait.ops.spec import AttendSpec, LatentSpec, RouterSpec
from plait.ops.symbolic import Symbol


def _operation(function: Callable[..., Any], operands: int = 1, weights: int = 0) -> Callable[..., Any]:
    """The operation of a reference function: `operands` values, up to `weights` weights, then attributes by name."""
    name = function.__name__
    parameters = signature(function).parameters.values()
    # A recording names every attribute, so that no executor needs to know defaults.
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}

    @wraps(function)
    def operation(x: Any, *more: Any, **attributes: Any) -> Any:
        if isinstance(x, Symbol):
            given = (*more[operands - 1 :], *(None,) * weights)[:weights]
            return x.recorder.emit(name, (x, *more[: operands - 1]), given, **(defaults | attributes))
        return function(x, *more, **attributes)

    return operation


embed = _operation(reference.embed, weights=1)
positions = _operation(reference.positions)
positions_by_reach = _operation(reference.positions_by_reach, operands=2)
linear = _operation(reference.linear, weights=2)
rms_norm = _operation(reference.rms_norm, weights=1)
layer_norm = _operation(reference.layer_norm, weights=2)
head_norm = _operation(reference.head_norm, weights=1)
rotate = _operation(reference.rotate, operands=2)
gate = _operation(reference.gate, operands=2)
activate = _operation(reference.activate)
xielu = _operation(reference.xielu, weights=4)
experts = _operation(reference.experts, operands=3, weights=4)
dropout = _operation(reference.dropout)
cast = _operation(reference.cast)
view = _operation(reference.view)
split = _operation(reference.split)
add = _operation(reference.add, operands=2)
scale = _operation(reference.scale)
soft_cap = _operation(reference.soft_cap)
clip = _operation(reference.clip)
select_rows = _operation(reference.select_rows, operands=2)
logits = _operation(reference.logits, weights=2)


def attend(q: Any, k: Any, v: Any, sinks: Any = None, *, layer: int, spec: AttendSpec, memory: Any) -> Any:
    """Write k and v of a layer into the memory, attend with q: [..., H, dk] -> [..., H, dv].

    The one operation that also needs the memory, which a recording does not hold.
    """
    if isinstance(q, Symbol):
        weights = () if sinks is None else (sinks,)
        return q.recorder.emit("attend", (q, k, v), weights, layer=layer, spec=spec.to_json())
    return reference.attend(q, k, v, sinks, layer=layer, spec=spec, memory=memory)


def attend_latent(q: Any, latent: Any, k_rope: Any, weight: Any, *, layer: int, spec: LatentSpec, memory: Any) -> Any:
    """Write latent [..., r] and k_rope [..., 1, rope] of a layer into the memory, attend with q [..., H, nope + rope],
    whose last features are rotated: -> [..., H, v]. weight: [H (nope + v), r]."""
    if isinstance(q, Symbol):
        return q.recorder.emit("attend_latent", (q, latent, k_rope), (weight,), layer=layer, spec=spec.to_json())
    return reference.attend_latent(q, latent, k_rope, weight, layer=layer, spec=spec, memory=memory)


def route(x: Any, weight: Any, bias: Any = None, selection_bias: Any = None, *, spec: RouterSpec) -> Any:
    """The experts that each token chooses, their weights, and all logits: x [..., D] -> i32 and f32 [..., k], f32
    [..., E]."""
    if isinstance(x, Symbol):
        return x.recorder.emit("route", (x,), (weight, bias, selection_bias), spec=spec.to_json())
    return reference.route(x, weight, bias, selection_bias, spec=spec)
