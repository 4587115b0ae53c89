"""The closed set of operations: what each takes, gives and costs.

This table is the one list of them. Adding an operation means: an entry here, a reference (plait.ops.reference), a
function of the forward's vocabulary (plait.ops.functional), and a test that every other implementation must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from plait.ops.recording import Shape, Value, WeightRef

Weights = Sequence[WeightRef | None]
Infer = Callable[[Sequence[Value], Weights, dict[str, Any]], tuple[Value, ...]]
Flops = Callable[[Sequence[Value], Weights, dict[str, Any]], int]


@dataclass(frozen=True)
class Operation:
    """infer: shapes and dtypes of the outputs. flops: floating-point operations per token. memory: whether it reads and
    writes the key/value memory; what that costs per token and visible key is `plait.ops.latent.flops_per_key`."""

    doc: str
    infer: Infer
    flops: Flops = lambda values, weights, attrs: 0
    memory: bool = False


def _numbers(value: Value) -> int:
    """Numbers per token: the product of the axes that are not symbols."""
    return prod(s for s in value.shape if isinstance(s, int))


def _same(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return (values[0],)


def _embed(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return (Value((*values[0].shape, _weight(weights).shape[1])),)


def _positions(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return (Value((*values[0].shape, 2, len(attrs["inv_freq"])), "f32"),)


def _linear(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return (Value((*values[0].shape[:-1], _weight(weights).shape[0]), values[0].dtype),)


def _logits(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return (Value((*values[0].shape[:-1], _weight(weights).shape[0]), "f32"),)


def _attend(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    q = values[0]
    return (Value((*q.shape[:-1], attrs["spec"]["value_width"]), q.dtype),)


def _view(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    shape: Shape = (*values[0].shape[: -attrs["drop"]], *attrs["tail"])
    return (Value(shape, values[0].dtype),)


def _split(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return tuple(Value((*values[0].shape[:-1], size), values[0].dtype) for size in attrs["sizes"])


def _select_rows(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return (Value((*values[1].shape, *values[0].shape[1:]), values[0].dtype),)


def _cast(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return (Value(values[0].shape, attrs["dtype"]),)


def _matrix_flops(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> int:
    out, inner = _weight(weights).shape
    return 2 * out * inner


def _route(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    spec, tokens = attrs["spec"], values[0].shape[:-1]
    chosen = (*tokens, spec["top_k"])
    return Value(chosen, "i32"), Value(chosen, "f32"), Value((*tokens, spec["num_experts"]), "f32")


def _experts_flops(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> int:
    """Of the experts that a token chooses, not of all."""
    chosen = values[1].shape[-1]
    assert isinstance(chosen, int)
    return 2 * chosen * sum(prod(ref.shape[1:]) for ref in weights if ref is not None and len(ref.shape) == 3)


def _gate(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> tuple[Value, ...]:
    return (values[1],)


def _gate_flops(values: Sequence[Value], weights: Weights, attrs: dict[str, Any]) -> int:
    return 5 * _numbers(values[0]) + _numbers(values[1])


def _pointwise(per_number: int) -> Flops:
    return lambda values, weights, attrs: per_number * _numbers(values[0])


def _weight(weights: Weights) -> WeightRef:
    first = weights[0]
    assert first is not None
    return first


OPERATIONS: dict[str, Operation] = {
    "embed": Operation("ids [N] -> rows of the table, times scale [N, D]", _embed),
    "positions": Operation("positions [N] -> cos and sin of a rotary table, fp32 [N, 2, d/2]", _positions),
    "positions_by_reach": Operation(
        "the same of one of two tables, by the most tokens that a token's sequence will have [N]", _positions
    ),
    "linear": Operation("x [N, I] -> x W^T + b [N, O]; weights W [O, I], b [O] or none", _linear, _matrix_flops),
    "rms_norm": Operation("x / rms(x) * w over the last axis, statistics in fp32", _same, _pointwise(4)),
    "layer_norm": Operation("(x - mean) / sd * w + b over the last axis, statistics in fp32", _same, _pointwise(6)),
    "head_norm": Operation("a norm of every head of q or k: [N, H, d]", _same, _pointwise(4)),
    "rotate": Operation(
        "rotate `width` features of every head [N, H, d], from the feature `start` on, by the angles",
        _same,
        _pointwise(3),
    ),
    "attend": Operation(
        "write k [N, Hk, dk], v [N, Hk, dv] of a layer, attend with q [N, H, dk] -> [N, H, dv]; weight: sinks [H] or"
        " none",
        _attend,
        memory=True,
    ),
    "attend_latent": Operation(
        "write [latent [N, r] ; k_rope [N, 1, rope]] of a layer, attend with q [N, H, nope + rope] -> [N, H, v]; weight"
        " W [H (nope + v), r]: of each head the rows that make its keys of a latent, then those that make its values",
        _attend,
        _matrix_flops,
        memory=True,
    ),
    "gate": Operation(
        "act(x) * y; x may be one number per token, [N, 1]; kind clamped_swiglu has alpha and limit", _gate, _gate_flops
    ),
    "activate": Operation("act(x)", _same, _pointwise(5)),
    "xielu": Operation("xIELU(x); weights alpha_p, alpha_n, beta, eps: a number each", _same, _pointwise(8)),
    "route": Operation(
        "x [N, D] -> the experts that each token chooses, i32 [N, k], best first, their weights, f32 [N, k], and the"
        " logits x W^T + b, f32 [N, E]; weights W [E, D], b [E] or none, a bias of the selection [E] or none",
        _route,
        _matrix_flops,
    ),
    "experts": Operation(
        "x [N, D], ids i32 [N, k], weights f32 [N, k] -> the sum over j of weights[:, j] times expert ids[:, j] of x,"
        " in fp32 and then cast, [N, D]; ids of -1 (padding; serving has none) add nothing;"
        " weights gate_up [E, 2F, D] (rows 0 .. F - 1 are the gate's), its bias [E, 2F] or none, down [E, D, F], its"
        " bias [E, D] or none; gated false: gate_up is up alone, [E, F, D]",
        _same,
        _experts_flops,
    ),
    "dropout": Operation("zero a share p of x and scale the rest; identity outside training", _same),
    "cast": Operation("x in another dtype", _cast),
    "view": Operation("the last `drop` axes as `tail`", _view),
    "split": Operation("the last axis cut into `sizes`", _split),
    "add": Operation("x + y", _same, _pointwise(1)),
    "scale": Operation("x * factor", _same, _pointwise(1)),
    "soft_cap": Operation("c * tanh(x / c)", _same, _pointwise(4)),
    "clip": Operation("x limited to [-limit, limit]", _same, _pointwise(1)),
    "select_rows": Operation("x [N, D], rows [R] -> [R, D]", _select_rows),
    "logits": Operation("x [R, D] -> x E^T + b in fp32 [R, V]; E [V, D], b [V] or none", _logits, _matrix_flops),
}

# Names that the set reserves: collectives come with parallelism.
RESERVED = ("all_reduce", "all_gather", "all_to_all")
