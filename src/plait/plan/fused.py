"""Fused operations: what a fusion rule puts in place of several, each with its reference, the composition of theirs.

| name | inputs | weights | attributes |
|---|---|---|---|
| linear_add | x, residual | W, b | |
| linear_group | x | W, b of each | |
| gated_linear | x | W and b of the gate, W and b of the other factor | kind, and its numbers |
| activated_linear | x | W, b | kind |
| capped_logits | x | E, b | limit |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FUSED = ("linear_add", "linear_group", "gated_linear", "activated_linear", "capped_logits")


def references() -> dict[str, Callable[..., Any]]:
    """The reference of every operation that a fused recording may hold, by name. Imports torch."""
    from plait.ops import reference as r

    def linear_add(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        return r.add(residual, r.linear(x, weight, bias))

    def linear_group(x: Any, *weights: Any) -> tuple[Any, ...]:
        return tuple(r.linear(x, w, b) for w, b in zip(weights[::2], weights[1::2], strict=True))

    def gated_linear(x: Any, gate: Any, gate_bias: Any, up: Any, up_bias: Any, *, kind: str, **numbers: float) -> Any:
        return r.gate(r.linear(x, gate, gate_bias), r.linear(x, up, up_bias), kind=kind, **numbers)

    def activated_linear(x: Any, weight: Any, bias: Any, *, kind: str) -> Any:
        return r.activate(r.linear(x, weight, bias), kind=kind)

    def capped_logits(x: Any, head: Any, bias: Any = None, *, limit: float) -> Any:
        return r.soft_cap(r.logits(x, head, bias), limit=limit)

    compositions = (linear_add, linear_group, gated_linear, activated_linear, capped_logits)
    return {**r.REFERENCE, **{f.__name__: f for f in compositions}}
