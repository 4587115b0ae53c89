"""The state of lowering: which buffers values have, which matrices and caches there are, what was emitted. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from plait.errors import RecordingError, WeightError
from plait.kernels.abi import (
    ACTIVATIONS,
    FLOAT_LAYOUTS,
    GATES,
    KIND_F32,
    KIND_I32,
    KIND_Q8,
    LAYOUTS,
    PANEL_ROWS,
    ROWS_LOGITS,
    ROWS_TOKENS,
)
from plait.memory.layout import CacheLayout
from plait.ops.recording import Op, Recording, Shape, WeightRef
from plait.plan.lowered import (
    HostCall,
    HostOperand,
    Lowered,
    MatrixRef,
    PlanBuffer,
    PlanOp,
    row_size,
)
from plait.weights.store import VECTOR, PackedWeight

QUANTISED_BLOCK = 32
# Operations that multiply with matrices, and read their first operand as numbers or as quantised records.
PRODUCTS = frozenset(
    {"linear", "linear_add", "linear_group", "gated_linear", "activated_linear", "logits", "capped_logits"}
)


class Lowering:
    """What one pass over the operations has made so far, and what operations are lowered with."""

    def __init__(self, recording: Recording, weights: Mapping[str, PackedWeight], layout: CacheLayout) -> None:
        self.recording = recording
        self.weights = weights
        self.layout = layout
        self.out = Lowered()
        for ref in recording.weights():
            if ref.name not in weights:
                raise WeightError(f"the plan needs the weight {ref.name}, which is not there")
            if tuple(weights[ref.name].shape) != ref.shape:
                raise WeightError(f"weight {ref.name} has shape {tuple(weights[ref.name].shape)}, recorded {ref.shape}")
        # View, dropout (of serving) and cast change no number: their values are their inputs.
        self.same: dict[int, int] = {}
        for op in recording.ops:
            if op.name in ("view", "dropout", "cast"):
                self.same[op.outputs[0]] = self.root(op.inputs[0])
        self.readers: dict[int, list[tuple[Op, int]]] = {}
        for op in recording.ops:
            if op.name not in ("view", "dropout", "cast"):
                for place, value in enumerate(op.inputs):
                    self.readers.setdefault(self.root(value), []).append((op, place))
        self.last_reader = {value: readers[-1][0] for value, readers in self.readers.items()}
        self.kept = {self.root(value) for value in recording.outputs.values()}
        self.step_arrays = {number: name for name, number in recording.inputs.items()}
        self.fits = {id(op): self.product_fits(op) for op in recording.ops if op.name in PRODUCTS}
        self.plain: dict[int, int] = {}  # value -> buffer of its numbers
        self.records: dict[int, int] = {}  # value -> buffer of its quantised records
        self.sliced: set[int] = set()  # buffers in which parts of a row are values of their own
        self.matrix_numbers: dict[MatrixRef, int] = {}
        self.cache_numbers: dict[int, int] = {}
        self.table_starts: dict[tuple[float, ...], int] = {}
        self.frequencies: list[float] = []

    def root(self, value: int) -> int:
        return self.same.get(value, value)

    # Values

    def shape(self, value: int) -> Shape:
        return self.recording.values[value].shape

    def tail(self, value: int) -> tuple[int, ...]:
        """The axes of one row."""
        return tuple(int(axis) for axis in self.shape(value)[1:])

    def heads(self, value: int) -> tuple[int, int]:
        """(heads, width): the last axis and how often a row holds it."""
        tail = self.tail(value)
        return prod(tail[:-1]), tail[-1]

    def buffer(self, rows: int, kind: int, width: int, memory: int = -1, column: int = 0) -> int:
        """A new buffer's number; `memory`: the one that it lies in, if not its own."""
        number = len(self.out.buffers)
        row_bytes = self.out.buffers[memory].row_bytes if memory >= 0 else row_size(kind, width)
        memory = number if memory < 0 else self.out.buffers[memory].memory
        self.out.buffers.append(PlanBuffer(rows, kind, width, row_bytes, memory, column))
        return number

    def slots(self, rows: int, kind: int, count: int, width: int, least: int = 0) -> int:
        """A buffer with `count` slots of `width` numbers in each row, of at least `least` bytes; nobody's value."""
        number = len(self.out.buffers)
        row_bytes = count * max(row_size(kind, width), least)
        self.out.buffers.append(PlanBuffer(rows, kind, count * width, row_bytes, number))
        return number

    def rows(self, value: int) -> int:
        first = self.shape(value)[0] if self.shape(value) else None
        if first not in ("N", "R") or any(isinstance(axis, str) for axis in self.shape(value)[1:]):
            raise RecordingError(
                f"value {value} has shape {self.shape(value)}: a plan keeps rows per token or logit row"
            )
        return ROWS_TOKENS if first == "N" else ROWS_LOGITS

    def new(self, value: int, quantised: bool = False, memory: int = -1, column: int = 0) -> int:
        """The buffer of a value that is about to be written."""
        width = prod(self.tail(value))
        dtype = self.recording.values[value].dtype
        kind = KIND_Q8 if quantised else KIND_I32 if dtype in ("i64", "i32") else KIND_F32
        number = self.buffer(self.rows(value), kind, width, memory, column)
        (self.records if quantised else self.plain)[value] = number
        return number

    def of(self, value: int) -> int:
        """The buffer that a value's numbers are in."""
        return self.plain[self.root(value)]

    def is_float(self, value: int) -> bool:
        """Whether a value is floats in a buffer, and not an array of the step or integers."""
        return value not in self.step_arrays and self.recording.values[value].dtype in ("compute", "f32")

    def floats(self, *values: int) -> bool:
        return all(self.is_float(value) for value in values)

    def record(self, value: int, op: Op) -> int:
        """The buffer of a value's quantised records, made where it is first asked for."""
        value = self.root(value)
        if value not in self.records:
            source = self.plain[value]
            number = self.new(value, quantised=True)
            self.emit("quantise", op, (source,), (number,))
        return self.records[value]

    def only_as_records(self, value: int) -> bool:
        """Whether everything that reads a value reads its quantised records, so that nobody needs the numbers."""
        readers = self.readers.get(value, [])
        return (
            bool(readers)
            and value not in self.kept
            and prod(self.tail(value)) % QUANTISED_BLOCK == 0
            and all(place == 0 and self.fits.get(id(op), False) and self.quantised(op) for op, place in readers)
        )

    # Weights

    def matrix(self, ref: WeightRef | None) -> int:
        if ref is None:
            return -1
        return self.matrix_numbers.setdefault(MatrixRef(ref.name, ref.rows), len(self.matrix_numbers))

    def second(self, ref: WeightRef) -> int:
        """The second layout of a weight."""
        return self.matrix_numbers.setdefault(MatrixRef(ref.name, second=True), len(self.matrix_numbers))

    def is_vector(self, ref: WeightRef | None, width: int | None = None) -> bool:
        """Whether a weight is absent or a vector (of this many numbers in all)."""
        if ref is None:
            return True
        rows = ref.rows or (0, prod(ref.shape))
        return self.weights[ref.name].layout == VECTOR and width in (None, rows[1] - rows[0])

    def quantised(self, op: Op) -> bool:
        """Whether a product's matrices are quantised."""
        assert op.weights[0] is not None
        return self.weights[op.weights[0].name].layout not in FLOAT_LAYOUTS

    def product_fits(self, op: Op) -> bool:
        """Whether there is a kernel for a product: packed matrices of one kind, biases as vectors, a known function."""
        known = GATES if op.name == "gated_linear" else ACTIVATIONS
        if op.attrs.get("kind", "silu") not in known:
            return False
        head = op.name in ("logits", "capped_logits")
        if any(not self.is_float(value) for value in op.inputs) or (head and self.shape(op.inputs[0])[0] != "R"):
            return False
        matrices, biases = op.weights[::2], op.weights[1::2]
        width = prod(self.tail(op.inputs[0]))
        kinds = set()
        for ref in matrices:
            if ref is None or len(ref.shape) != 2 or ref.shape[1] != width:
                return False
            form = self.weights[ref.name].layout
            if form not in LAYOUTS or (ref.rows is not None and ref.rows[0] % PANEL_ROWS):
                return False
            kinds.add(form in FLOAT_LAYOUTS)
        if op.name == "linear_add" and self.shape(op.inputs[1]) != self.shape(op.outputs[0]):
            return False
        return len(kinds) == 1 and len(matrices) <= 3 and all(self.is_vector(ref) for ref in biases)

    # Operations

    def emit(
        self,
        kind: str,
        op: Op,
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
        w: tuple[int, ...] = (),
        i: tuple[int, ...] = (),
        f: tuple[float, ...] = (),
    ) -> None:
        label = next((ref.name for ref in op.weights if ref is not None), "")
        if not label and "layer" in op.attrs:
            label = f"layer {op.attrs['layer']}"
        self.out.ops.append(PlanOp(kind, inputs, outputs, w, i, f, label))

    def host(self, op: Op) -> None:
        """An operation for the reference. Whatever it reads lies in buffers as plain numbers."""
        inputs = tuple(
            HostOperand(-1, (), self.step_arrays[value])
            if value in self.step_arrays
            else HostOperand(self.of(value), self.tail(value))
            for value in op.inputs
        )
        outputs = tuple(HostOperand(self.new(value), self.tail(value)) for value in op.outputs)
        self.out.host[len(self.out.ops)] = HostCall(op, inputs, outputs)
        buffers = tuple(o.buffer for o in inputs if o.buffer >= 0)
        self.emit("host", op, buffers, tuple(o.buffer for o in outputs))

    def operand(self, op: Op) -> int:
        """The buffer that a product reads."""
        return self.record(op.inputs[0], op) if self.quantised(op) else self.of(op.inputs[0])
