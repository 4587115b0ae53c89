"""Symbolic operands: what the forward is run with once to record it.

A `Symbol` carries shape and dtype only. The operations know it; anything else that touches it fails with the line
that did.
"""

from __future__ import annotations

import traceback
from typing import Any, NoReturn

from plait.errors import RecordingError
from plait.ops.recording import Op, Recording, Value, WeightRef
from plait.ops.signatures import OPERATIONS


def _outside(what: str) -> NoReturn:
    """Raise with the innermost line that is not this module's or torch's."""
    frames = [f for f in traceback.extract_stack() if f.filename != __file__ and "/torch/" not in f.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown line"
    raise RecordingError(f"{what} is outside the set of operations, so this forward cannot be recorded ({where})")


class Symbol:
    """An operand without numbers. `ndim` and `shape` may be read; everything else must be an operation."""

    __slots__ = ("number", "recorder", "value")

    def __init__(self, recorder: Recorder, number: int, value: Value) -> None:
        self.recorder = recorder
        self.number = number
        self.value = value

    @property
    def shape(self) -> tuple[int | str, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return len(self.value.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _outside(f"reading .{name} of a value")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _outside(f"torch.{getattr(function, '__name__', function)} on a value")


def _forbid(method: str) -> None:
    def fail(self: Symbol, *args: Any) -> NoReturn:
        _outside(f"{method} on a value")

    setattr(Symbol, method, fail)


for _method in [
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__rtruediv__",
    "__matmul__",
    "__rmatmul__",
    "__neg__",
    "__pow__",
    "__getitem__",
    "__setitem__",
    "__len__",
    "__iter__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
]:
    _forbid(_method)


class Recorder:
    """Collects operations while a forward runs on symbols. names: id(parameter) -> its name."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self.inputs: dict[str, int] = {}

    def input(self, name: str, value: Value) -> Symbol:
        symbol = self._new(value)
        self.inputs[name] = symbol.number
        return symbol

    def emit(self, name: str, inputs: tuple[Any, ...], weights: tuple[Any, ...] = (), **attrs: Any) -> Any:
        """Append an operation; its output symbol, or a tuple of them where it has several."""
        for operand in inputs:
            if not isinstance(operand, Symbol):
                _outside(f"{name} with an operand of type {type(operand).__name__}")
        refs = tuple(self._reference(w) for w in weights)
        values = [i.value for i in inputs]
        attrs = {key: list(value) if isinstance(value, tuple) else value for key, value in attrs.items()}
        outputs = tuple(self._new(v) for v in OPERATIONS[name].infer(values, refs, attrs))
        self._ops.append(Op(name, tuple(i.number for i in inputs), tuple(o.number for o in outputs), refs, attrs))
        return outputs[0] if len(outputs) == 1 else outputs

    def recording(self, outputs: dict[str, Symbol], caches: Any = (), model: dict[str, Any] | None = None) -> Recording:
        numbers = {name: symbol.number for name, symbol in outputs.items()}
        return Recording(tuple(self._values), tuple(self._ops), self.inputs, numbers, tuple(caches), model or {})

    def _new(self, value: Value) -> Symbol:
        self._values.append(value)
        return Symbol(self, len(self._values) - 1, value)

    def _reference(self, weight: Any) -> WeightRef | None:
        if weight is None or isinstance(weight, WeightRef):
            return weight
        name = self._names.get(id(weight))
        if name is None:
            _outside(f"a {type(weight).__name__} that is no named parameter, used as a weight,")
        return WeightRef(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."))
