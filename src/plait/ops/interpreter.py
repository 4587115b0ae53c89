"""Replays a recording, one operation at a time, with the reference operations. Needs no model class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from plait.errors import WeightError
from plait.ops.adapted import AdaptedRows
from plait.ops.recording import Op, Recording
from plait.ops.reference import REFERENCE
from plait.ops.signatures import OPERATIONS
from plait.ops.spec import AttendSpec, LatentSpec, RouterSpec

# Operations whose `spec` is an object for the reference and a dictionary in a recording.
_SPECS: dict[str, Callable[..., Any]] = {
    "attend": AttendSpec,
    "attend_latent": LatentSpec,
    "route": RouterSpec,
}

Observer = Callable[[Op, tuple[Any, ...], tuple[Any, ...]], None]


class Interpreter:
    """An executor of a recording over named weights.

    weights: name -> tensor (a state dict). functions: the reference of each operation, by name; a fused recording
    needs plait.plan.fused's too. Raises WeightError naming what is missing or has another shape.
    """

    def __init__(
        self,
        recording: Recording,
        weights: Mapping[str, Tensor],
        functions: Mapping[str, Callable[..., Any]] = REFERENCE,
    ) -> None:
        self.recording = recording
        for ref in recording.weights():
            if ref.name not in weights:
                raise WeightError(f"the recording needs the weight {ref.name}, which is not there")
            if tuple(weights[ref.name].shape) != ref.shape:
                raise WeightError(f"weight {ref.name} has shape {tuple(weights[ref.name].shape)}, recorded {ref.shape}")
        self._steps = [
            (
                op,
                functions[op.name],
                [None if w is None else _rows(weights[w.name], w.rows) for w in op.weights],
                attributes(op),
                ends,
            )
            for op, ends in zip(recording.ops, recording.last_uses(), strict=True)
        ]

    def run(
        self,
        inputs: Mapping[str, Tensor],
        memory: Any,
        observe: Observer | None = None,
        adapted: AdaptedRows | None = None,
    ) -> dict[str, Tensor]:
        """inputs: by the recording's names (ids, positions, logit_rows). memory: a step of a memory (`begin`).

        observe: called after each operation with it, its inputs and its outputs. adapted: what adapters add to the
        linear products; the recording must not be fused then.
        """
        values: dict[int, Any] = {number: inputs[name] for name, number in self.recording.inputs.items()}
        for op, function, weights, attrs, ends in self._steps:
            operands = tuple(values[i] for i in op.inputs)
            more = {"memory": memory} if op.name in OPERATIONS and OPERATIONS[op.name].memory else {}
            result = function(*operands, *weights, **attrs, **more)
            if adapted is not None and op.name == "linear" and op.weights[0] is not None:
                result = adapted.add(op.weights[0], operands[0], result)
            results = result if isinstance(result, tuple) else (result,)
            values.update(zip(op.outputs, results, strict=True))
            if observe is not None:
                observe(op, operands, results)
            for number in ends:
                del values[number]
        return {name: values[number] for name, number in self.recording.outputs.items()}


def attributes(op: Op) -> dict[str, Any]:
    """The keyword arguments of an operation's reference."""
    attrs = dict(op.attrs)
    if "spec" in attrs:
        attrs["spec"] = _SPECS[op.name](**attrs["spec"])
    return attrs


def _rows(weight: Tensor, rows: tuple[int, int] | None) -> Tensor:
    return weight if rows is None else weight[rows[0] : rows[1]]
