"""Fusion: rules that rewrite a recording into an equal one with fewer, larger operations.

A rule never changes what is computed: the fused operation's reference (plait.plan.fused) is the composition of what it
replaces, and a value that anything else reads is not fused away. Value numbers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.ops.recording import Op, Recording, WeightRef

# Products that one operation of a plan can hold (PLAIT_OP_LINEAR).
GROUP = 3
FLOAT_FORMATS = frozenset({"f32", "float32", "float16", "bfloat16", "float64"})

Quantised = Callable[[WeightRef], bool]
Rule = Callable[[Recording, Quantised], Recording]


def fuse(recording: Recording, quantised: Quantised | None = None) -> Recording:
    """The recording after every rule.

    quantised: whether a weight is kept in a quantised layout; products that read one input together must agree in it,
    since quantised matrices read the input as integers. Default: what the recording itself says of the format.
    """
    for rule in RULES:
        recording = rule(recording, quantised or _by_format)
    return recording


def gated_linear(recording: Recording, quantised: Quantised) -> Recording:
    """gate(linear(x), linear(x)) becomes one operation: neither product is ever written out whole."""
    g = _Graph(recording)
    for op in recording.ops:
        if op.name != "gate":
            continue
        gate, up = (g.only(value, "linear") for value in op.inputs)
        if gate is None or up is None or gate is up or gate.inputs != up.inputs:
            continue
        if not g.alike(op.inputs) or quantised(_matrix(gate)) != quantised(_matrix(up)):
            continue
        weights = (*gate.weights, *up.weights)
        g.replace(op, (gate, up), Op("gated_linear", gate.inputs, op.outputs, weights, op.attrs))
    return g.rewritten()


def activated_linear(recording: Recording, quantised: Quantised) -> Recording:
    """activate(linear(x)) becomes one operation."""
    g = _Graph(recording)
    for op in recording.ops:
        linear = g.only(op.inputs[0], "linear") if op.name == "activate" else None
        if linear is not None:
            g.replace(op, (linear,), Op("activated_linear", linear.inputs, op.outputs, linear.weights, op.attrs))
    return g.rewritten()


def linear_add(recording: Recording, quantised: Quantised) -> Recording:
    """add(residual, linear(x)), in either order, becomes one operation. Of two products the later one takes the add."""
    g = _Graph(recording)
    for op in recording.ops:
        if op.name != "add" or not g.alike(op.inputs):
            continue
        products = [(g.only(value, "linear"), value) for value in op.inputs]
        found = [(linear, value) for linear, value in products if linear is not None]
        if not found:
            continue
        linear, value = max(found, key=lambda pair: g.index[pair[1]])
        (residual,) = (i for i in op.inputs if i != value)
        inputs = (*linear.inputs, residual)
        g.replace(op, (linear,), Op("linear_add", inputs, op.outputs, linear.weights))
    return g.rewritten()


def capped_logits(recording: Recording, quantised: Quantised) -> Recording:
    """soft_cap(logits(x)) becomes one operation."""
    g = _Graph(recording)
    for op in recording.ops:
        head = g.only(op.inputs[0], "logits") if op.name == "soft_cap" else None
        if head is not None:
            g.replace(op, (head,), Op("capped_logits", head.inputs, op.outputs, head.weights, op.attrs))
    return g.rewritten()


def linear_group(recording: Recording, quantised: Quantised) -> Recording:
    """Up to three products of one input (q, k, v), all quantised or all not, become one operation.

    It stands where the first of them stood: all that a product needs is its input.
    """
    g = _Graph(recording)
    groups: dict[tuple[int, bool], list[Op]] = {}
    for op in recording.ops:
        if op.name == "linear":
            groups.setdefault((op.inputs[0], quantised(_matrix(op))), []).append(op)
    for members in groups.values():
        for start in range(0, len(members), GROUP):
            group = members[start : start + GROUP]
            if len(group) > 1:
                outputs = tuple(op.outputs[0] for op in group)
                weights = tuple(w for op in group for w in op.weights)
                g.replace(group[0], group[1:], Op("linear_group", group[0].inputs, outputs, weights))
    return g.rewritten()


RULES: tuple[Rule, ...] = (gated_linear, activated_linear, linear_add, capped_logits, linear_group)


# Operations whose rows do not know of one another: a row of the result needs that row of the operands only.
_BY_ROW = frozenset(
    (
        *("linear", "rms_norm", "layer_norm", "head_norm", "rotate", "gate", "activate", "xielu", "route"),
        "experts",
        *("dropout", "cast", "view", "split", "add", "scale", "soft_cap", "clip"),
    )
)


def select_early(recording: Recording) -> Recording:
    """The recording without its hidden states, with select_rows as early as it can be: after the last attention.

    What stands between the two is then computed for the rows whose logits are wanted only, which a step that reads a
    prompt has few of. Not one of `RULES`, since the plan can no longer give hidden states. A recording of another form
    comes back as it is.
    """
    selects = [op for op in recording.ops if op.name == "select_rows"]
    if len(selects) != 1 or "logits" not in recording.outputs:
        return recording
    (select,) = selects
    source, chosen = select.inputs
    readers: dict[int, list[Op]] = {}
    for op in recording.ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    outputs = {name: value for name, value in recording.outputs.items() if name != "hidden"}
    # What can follow the selection: by row, and read by nothing that comes before it.
    moved = [select]
    for op in reversed(recording.ops[: recording.ops.index(select)]):
        alone = all(any(r is m for m in moved) for value in op.outputs for r in readers.get(value, ()))
        read = any(value in readers for value in op.outputs) and not set(op.outputs) & set(outputs.values())
        if op.name in _BY_ROW and alone and read and not any(value == chosen for value in op.inputs):
            moved.append(op)
    values = list(recording.values)
    made = {value for op in moved if op is not select for value in op.outputs}
    for value in made:
        values[value] = replace(values[value], shape=("R", *values[value].shape[1:]))
    names: dict[int, int] = {}  # what a value is called where its rows are selected

    def at_rows(value: int, ops: list[Op]) -> int:
        if value in made:
            return value
        if value not in names:
            names[value] = len(values)
            values.append(replace(values[value], shape=("R", *values[value].shape[1:])))
            ops.append(Op("select_rows", (value, chosen), (names[value],)))
        return names[value]

    ops: list[Op] = []
    for op in recording.ops:
        if op is select:
            names[select.outputs[0]] = at_rows(source, ops)
        elif any(op is m for m in moved):
            ops.append(replace(op, inputs=tuple(at_rows(value, ops) for value in op.inputs)))
        else:
            ops.append(replace(op, inputs=tuple(names[v] if v == select.outputs[0] else v for v in op.inputs)))
    outputs = {name: names.get(v, v) if v == select.outputs[0] else v for name, v in outputs.items()}
    return replace(recording, values=tuple(values), ops=tuple(ops), outputs=outputs)


class _Graph:
    """A recording with an index of who writes and who reads each value, and the replacements collected so far.

    index: value -> number of the operation that writes it.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.index = {value: i for i, op in enumerate(recording.ops) for value in op.outputs}
        self._readers: dict[int, int] = {}
        for value in (*(i for op in recording.ops for i in op.inputs), *recording.outputs.values()):
            self._readers[value] = self._readers.get(value, 0) + 1
        self._new: dict[int, Op | None] = {}

    def only(self, value: int, name: str) -> Op | None:
        """The operation `name` that writes a value which has one reader, and which no rule has taken yet."""
        i = self.index.get(value)
        if i is None or self._readers[value] != 1 or i in self._new:
            return None
        op = self.recording.ops[i]
        return op if op.name == name else None

    def alike(self, values: tuple[int, ...]) -> bool:
        """Whether these values have one shape: a rule must not change what is broadcast."""
        return len({self.recording.values[value].shape for value in values}) == 1

    def replace(self, at: Op, gone: list[Op] | tuple[Op, ...], new: Op) -> None:
        """`new` stands where `at` stood; `gone` fall away."""
        self._new[self.index[at.outputs[0]]] = new
        for op in gone:
            self._new[self.index[op.outputs[0]]] = None

    def rewritten(self) -> Recording:
        if not self._new:
            return self.recording
        ops = (self._new.get(i, op) for i, op in enumerate(self.recording.ops))
        return replace(self.recording, ops=tuple(op for op in ops if op is not None))


def _matrix(op: Op) -> WeightRef:
    ref = op.weights[0]
    assert ref is not None
    return ref


def _by_format(ref: WeightRef) -> bool:
    return ref.format not in FLOAT_FORMATS
