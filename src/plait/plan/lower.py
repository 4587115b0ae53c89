"""Lowering: a recording becomes descriptors of native operations over buffers, matrices and caches. No torch.

The runtime hands out the rows of operations that work on each row alone in chunks, and runs a *stage* of several such
operations on a chunk without waiting for other threads; every other operation is a stage of its own, with barriers
around it. That decides what memory may be reused: a value's bytes are free for what is written after the barrier that
follows its last reader.

What has no native form, or one outside the kernels' limits, becomes a HOST operation: the runtime returns there and
plait.plan.host computes it with the reference. `Lowered.host_ops` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from plait.errors import RecordingError, WeightError
from plait.kernels.abi import (
    ACTIVATIONS,
    FLOAT_LAYOUTS,
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
from plait.weights.numbers import rounded
from plait.weights.store import VECTOR, PackedWeight

# Operations that a thread may run on a few rows without the others (csrc/plan.cpp has the same list).
ROW_LOCAL = frozenset(
    (
        *("embed", "positions", "rms_norm", "layer_norm", "rotate", "write_kv", "gate", "activate"),
        *("add", "scale", "soft_cap", "clip", "quantise", "copy", "hidden"),
    )
)
QUANTISED_BLOCK = 32
_ALIGNMENT = 64
# Buffers do not begin at equal addresses modulo a page, or the first rows of all of them would fight for the same
# lines of the first cache when a step has one token.
_PAGE = 4096
_STAGGER = 9 * _ALIGNMENT


@dataclass(frozen=True)
class PlanOp:
    """A PlaitOp. kind: a name of abi.OP_KINDS. inputs, outputs: buffer numbers, w: matrix numbers, -1 = none.

    label: what it came from, for people.
    """

    kind: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    w: tuple[int, ...] = ()
    i: tuple[int, ...] = ()
    f: tuple[float, ...] = ()
    label: str = ""


@dataclass
class PlanBuffer:
    """A PlaitBuffer: rows of `width` numbers, row_bytes apart, from `offset` bytes of the arena on.

    rows: abi.ROWS_..., kind: abi.KIND_.... memory: the buffer whose bytes these are (itself, or one that it shares:
    a slice of its rows, or a sum written over one of its terms). column: where they begin in a row of it, in bytes.
    """

    rows: int
    kind: int
    width: int
    row_bytes: int
    memory: int
    column: int = 0
    offset: int = -1


@dataclass(frozen=True)
class MatrixRef:
    """A weight of the store, or the rows (start, stop) of it."""

    name: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class HostOperand:
    """What a HOST operation reads or writes: a buffer seen as [rows, *tail], or (buffer -1) an array of the step."""

    buffer: int
    tail: tuple[int, ...] = ()
    step: str = ""


@dataclass(frozen=True)
class HostCall:
    """A HOST operation: which one of the recording, and where its operands lie."""

    op: Op
    inputs: tuple[HostOperand, ...]
    outputs: tuple[HostOperand, ...]


@dataclass
class Lowered:
    """A plan but for the addresses. caches: model layer of each PlaitCache. tables: all rotary frequencies, float32.

    host: index into ops -> what to compute there.
    """

    ops: list[PlanOp] = field(default_factory=list)
    buffers: list[PlanBuffer] = field(default_factory=list)
    matrices: list[MatrixRef] = field(default_factory=list)
    caches: list[int] = field(default_factory=list)
    tables: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    host: dict[int, HostCall] = field(default_factory=dict)
    arena_bytes: int = 0
    vocab_size: int = 0
    hidden_size: int = 0

    @property
    def host_ops(self) -> tuple[str, ...]:
        """Names of the operations that run through the reference, each once."""
        return tuple(dict.fromkeys(call.op.name for call in self.host.values()))

    def stages(self) -> list[int]:
        """Stage of every operation: between two numbers all threads wait for one another."""
        stages: list[int] = []
        stage, open_rows = -1, None
        for op in self.ops:
            rows = self.rows_of(op) if op.kind in ROW_LOCAL else None
            stage += rows is None or rows != open_rows
            open_rows = rows
            stages.append(stage)
        return stages

    def rows_of(self, op: PlanOp) -> int:
        """Which rows an operation runs over: abi.ROWS_..., of its first output, else of its first input."""
        return self.buffers[(*op.outputs, *op.inputs)[0]].rows


def lower(
    recording: Recording, weights: Mapping[str, PackedWeight], layout: CacheLayout, max_tokens: int, max_rows: int
) -> Lowered:
    """The plan of a recording, fused or not, over packed weights.

    max_tokens, max_rows: the most flat tokens and logit rows of a step. Raises WeightError naming a weight that is not
    in the store or has another shape, RecordingError for a value that is neither per token nor per logit row.
    """
    return _Lowering(recording, weights, layout).lower(max_tokens, max_rows)


def quantised_row_bytes(width: int) -> int:
    """Bytes of a quantised record: int8 q[width], f32 scale[width / 32], f32 sum[width / 16], padded to 64."""
    return _round_up(width + width // 32 * 4 + width // 16 * 4, _ALIGNMENT)


class _Lowering:
    """One pass over the operations that emits native ones; memory is assigned afterwards."""

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

    def lower(self, max_tokens: int, max_rows: int) -> Lowered:
        for op in self.recording.ops:
            function = NATIVE.get(op.name)
            if function is None or not function(self, op):
                self.host(op)
            self.after(op)
        self.out.tables = np.array(self.frequencies, np.float32)
        self.out.matrices = list(self.matrix_numbers)
        self.out.caches = list(self.cache_numbers)
        _assign_memory(self.out, max_tokens, max_rows)
        return self.out

    def after(self, op: Op) -> None:
        """Hand the recording's outputs to the step as soon as they are there."""
        outputs = self.recording.outputs
        for name, value in outputs.items():
            if value not in op.outputs:
                continue
            if name == "hidden":
                buffer = self.plain[self.root(value)]
                self.out.hidden_size = self.out.buffers[buffer].width
                self.emit("hidden", op, (buffer,))
            elif name == "logits":
                self.out.vocab_size = prod(self.tail(value))
                if self.root(value) in self.plain:
                    # Something came after the product with the head: the host finds the best and stores the logits.
                    self.host(Op("store_logits", (value,), ()))
            else:
                raise RecordingError(f"a native plan has no output {name!r}; it gives hidden and logits")

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
        if memory >= 0:
            row_bytes = self.out.buffers[memory].row_bytes
        else:
            row_bytes = quantised_row_bytes(width) if kind == KIND_Q8 else _round_up(4 * width, _ALIGNMENT)
        memory = number if memory < 0 else self.out.buffers[memory].memory
        self.out.buffers.append(PlanBuffer(rows, kind, width, row_bytes, memory, column))
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

    def is_vector(self, ref: WeightRef | None, width: int | None = None) -> bool:
        """Whether a weight is absent or a vector (of this width)."""
        if ref is None:
            return True
        rows = ref.rows or (0, ref.shape[0])
        return self.weights[ref.name].layout == VECTOR and width in (None, rows[1] - rows[0])

    def quantised(self, op: Op) -> bool:
        """Whether a product's matrices are quantised."""
        assert op.weights[0] is not None
        return self.weights[op.weights[0].name].layout not in FLOAT_LAYOUTS

    def product_fits(self, op: Op) -> bool:
        """Whether there is a kernel for a product: packed matrices of one kind, biases as vectors, a known function."""
        if op.attrs.get("kind", "silu") not in ACTIVATIONS:
            return False
        head = op.name in ("logits", "capped_logits")
        if any(not self.is_float(value) for value in op.inputs) or (head and self.shape(op.inputs[0])[0] != "R"):
            return False
        matrices, biases = (op.weights, ()) if head else (op.weights[::2], op.weights[1::2])
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


# What each operation becomes. A function returns False, having emitted nothing, where there is no native form.


def _embed(low: _Lowering, op: Op) -> bool:
    (ref,) = op.weights
    if low.step_arrays.get(op.inputs[0]) != "ids" or ref is None or ref.rows is not None:
        return False
    if low.weights[ref.name].layout not in LAYOUTS:
        return False
    scale = op.attrs.get("scale", 1.0)
    if op.attrs.get("round_scale"):
        # The model was trained with the factor in its weights' dtype. A table of BF16 or F16 numbers tells that dtype;
        # one in fp32 needs no rounding, and of a quantised one nothing is known: there the factor stays as it is.
        scale = float(rounded(np.array([scale], np.float32), low.weights[ref.name].layout)[0])
    low.emit("embed", op, (), (low.new(op.outputs[0]),), (low.matrix(ref),), f=(scale,))
    return True


def _positions(low: _Lowering, op: Op) -> bool:
    if low.step_arrays.get(op.inputs[0]) != "positions":
        return False
    frequencies = tuple(op.attrs["inv_freq"])
    if frequencies not in low.table_starts:
        low.table_starts[frequencies] = len(low.frequencies)
        low.frequencies += frequencies
    i = (low.table_starts[frequencies], len(frequencies))
    low.emit("positions", op, (), (low.new(op.outputs[0]),), i=i, f=(op.attrs.get("magnitude", 1.0),))
    return True


def _linear(low: _Lowering, op: Op) -> bool:
    """linear, linear_group and linear_add."""
    if not low.fits[id(op)]:
        return False
    inputs: tuple[int, ...] = (low.operand(op),)
    outputs: tuple[int, ...]
    if op.name == "linear_add":
        residual = low.root(op.inputs[1])
        here = low.plain[residual]
        # The sum is written over the residual, where nobody reads that afterwards.
        dies = low.last_reader[residual] is op and residual not in low.kept and residual != low.root(op.inputs[0])
        over = here if dies and low.out.buffers[here].memory not in low.sliced else -1
        inputs += (here,)
        outputs = (low.new(op.outputs[0], memory=over),)
    else:
        outputs = tuple(low.new(value) for value in op.outputs)
    w = tuple(low.matrix(ref) for ref in op.weights)
    low.emit("linear", op, inputs, outputs, w, (len(outputs),))
    return True


def _activated(low: _Lowering, op: Op) -> bool:
    """gated_linear and activated_linear."""
    if not low.fits[id(op)]:
        return False
    inputs = (low.operand(op),)
    outputs = (low.new(op.outputs[0], quantised=low.only_as_records(op.outputs[0])),)
    w = tuple(low.matrix(ref) for ref in op.weights)
    kind = "gated" if op.name == "gated_linear" else "activated"
    low.emit(kind, op, inputs, outputs, w, (ACTIVATIONS[op.attrs["kind"]],))
    return True


def _logits(low: _Lowering, op: Op) -> bool:
    """logits and capped_logits. Where more is done to the logits, they are a product like any other."""
    value = op.outputs[0]
    if not low.fits[id(op)]:
        return False
    inputs, w = (low.operand(op),), (low.matrix(op.weights[0]),)
    limit = op.attrs.get("limit", 0.0)
    if low.recording.outputs.get("logits") == value and value not in low.readers:
        low.emit("logits", op, inputs, (), w, f=(limit,))
        return True
    product = low.new(value)
    low.emit("linear", op, inputs, (product,), (*w, -1), (1,))
    if limit:
        low.emit("soft_cap", op, (product,), (low.new(value),), f=(limit,))
    return True


def _rms_norm(low: _Lowering, op: Op) -> bool:
    """rms_norm and head_norm; fp32_weight means nothing in fp32."""
    (ref,) = op.weights
    heads, width = low.heads(op.inputs[0])
    if not low.floats(op.inputs[0]) or not low.is_vector(ref, width):
        return False
    i = (heads, width, int(bool(op.attrs.get("unit_offset"))))
    _row(low, op, "rms_norm", (low.matrix(ref),), i, (op.attrs["eps"],))
    return True


def _layer_norm(low: _Lowering, op: Op) -> bool:
    heads, width = low.heads(op.inputs[0])
    if not low.floats(op.inputs[0]) or not all(low.is_vector(ref, width) for ref in op.weights):
        return False
    _row(low, op, "layer_norm", tuple(low.matrix(ref) for ref in op.weights), (heads, width), (op.attrs["eps"],))
    return True


def _rotate(low: _Lowering, op: Op) -> bool:
    x, angles = op.inputs
    heads, width = low.heads(x)
    turning, pairing = op.attrs["width"], op.attrs.get("pairing", "halves")
    pairs = prod(low.tail(angles)) // 2
    if not low.floats(x, angles) or turning % 2 or 2 * pairs != turning or pairing not in ("halves", "adjacent"):
        return False
    _row(low, op, "rotate", (), (heads, width, turning, int(pairing == "adjacent")))
    return True


def _attend(low: _Lowering, op: Op) -> bool:
    spec, layer = op.attrs["spec"], op.attrs["layer"]
    group = low.layout.groups[low.layout.slot(layer)[0]]
    cache = group.cache
    widths = (cache.num_kv_heads, cache.key_width, cache.value_width)
    given = (spec["num_kv_heads"], spec["key_width"], spec["value_width"])
    # Window and cap that the kernels know, even widths, whole groups of heads, and blocks of whole vectors.
    if (
        not low.floats(*op.inputs)
        or widths != given
        or spec["key_width"] % 2
        or spec["value_width"] % 2
        or spec["num_heads"] % spec["num_kv_heads"]
        or group.block_tokens % 8
        or spec["window"] != cache.window
        or set(spec) - _ATTEND_KEYS
    ):
        return False
    number = low.cache_numbers.setdefault(layer, len(low.cache_numbers))
    q, k, v = (low.of(value) for value in op.inputs)
    low.emit("write_kv", op, (k, v), (), i=(number,))
    # A row of records is made when its heads are done; in the item itself only where a head fills whole blocks.
    records = spec["value_width"] % QUANTISED_BLOCK == 0 and low.only_as_records(op.outputs[0])
    out = low.new(op.outputs[0], quantised=records)
    f = (spec["scale"], spec["soft_cap"])
    low.emit("attend", op, (q,), (out,), (-1,), (number, spec["num_heads"], spec["window"]), f)
    return True


_ATTEND_KEYS = {"num_heads", "num_kv_heads", "key_width", "value_width", "scale", "window", "soft_cap"}


def _gate(low: _Lowering, op: Op) -> bool:
    if op.attrs["kind"] not in ACTIVATIONS or not _alike(low, op):
        return False
    _row(low, op, "gate", (), (ACTIVATIONS[op.attrs["kind"]],))
    return True


def _activate(low: _Lowering, op: Op) -> bool:
    if op.attrs["kind"] not in ACTIVATIONS or not low.floats(*op.inputs):
        return False
    _row(low, op, "activate", (), (ACTIVATIONS[op.attrs["kind"]],))
    return True


def _add(low: _Lowering, op: Op) -> bool:
    if not _alike(low, op):
        return False
    _row(low, op, "add")
    return True


def _constant(kind: str, attribute: str) -> Callable[[_Lowering, Op], bool]:
    """scale, soft_cap and clip: a row with one number."""

    def function(low: _Lowering, op: Op) -> bool:
        if not low.floats(*op.inputs):
            return False
        _row(low, op, kind, f=(op.attrs[attribute],))
        return True

    return function


def _select_rows(low: _Lowering, op: Op) -> bool:
    x, rows = op.inputs
    if not low.floats(x) or low.rows(x) != ROWS_TOKENS or low.step_arrays.get(rows) != "logit_rows":
        return False
    low.emit("select_rows", op, (low.of(x),), (low.new(op.outputs[0]),))
    return True


def _split(low: _Lowering, op: Op) -> bool:
    """Parts of a row that begin at aligned columns lie where they are."""
    if not low.floats(op.inputs[0]) or len(low.tail(op.inputs[0])) != 1:
        return False
    starts = np.cumsum([0, *op.attrs["sizes"][:-1]]) * 4
    if any(int(start) % _ALIGNMENT for start in starts):
        return False
    source = low.of(op.inputs[0])
    low.sliced.add(low.out.buffers[source].memory)
    for value, start in zip(op.outputs, starts, strict=True):
        low.new(value, memory=source, column=low.out.buffers[source].column + int(start))
    return True


def _nothing(low: _Lowering, op: Op) -> bool:
    """view, dropout and cast, where they leave the numbers as they are."""
    return op.attrs.get("dtype", "f32") == "f32"


def _alike(low: _Lowering, op: Op) -> bool:
    """Whether all operands are floats of one shape: kernels do not broadcast."""
    return low.floats(*op.inputs) and len({low.shape(value) for value in op.inputs}) == 1


def _row(
    low: _Lowering,
    op: Op,
    kind: str,
    w: tuple[int, ...] = (),
    i: tuple[int, ...] = (),
    f: tuple[float, ...] = (),
) -> None:
    """A row operation: its operands' buffers in, a new buffer out."""
    inputs = tuple(low.of(value) for value in op.inputs)
    low.emit(kind, op, inputs, (low.new(op.outputs[0]),), w, i, f)


PRODUCTS = frozenset(
    {"linear", "linear_add", "linear_group", "gated_linear", "activated_linear", "logits", "capped_logits"}
)
NATIVE: dict[str, Callable[[_Lowering, Op], bool]] = {
    "embed": _embed,
    "positions": _positions,
    "linear": _linear,
    "linear_add": _linear,
    "linear_group": _linear,
    "gated_linear": _activated,
    "activated_linear": _activated,
    "rms_norm": _rms_norm,
    "head_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rotate": _rotate,
    "attend": _attend,
    "gate": _gate,
    "activate": _activate,
    "dropout": _nothing,
    "cast": _nothing,
    "view": _nothing,
    "split": _split,
    "add": _add,
    "scale": _constant("scale", "factor"),
    "soft_cap": _constant("soft_cap", "limit"),
    "clip": _constant("clip", "limit"),
    "select_rows": _select_rows,
    "logits": _logits,
    "capped_logits": _logits,
}


def _assign_memory(plan: Lowered, max_tokens: int, max_rows: int) -> None:
    """Give every buffer its offset in one arena, as small as reuse across barriers makes it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for op, stage in zip(plan.ops, plan.stages(), strict=True):
        for number in (*op.inputs, *op.outputs):
            memory = plan.buffers[number].memory
            first.setdefault(memory, stage)
            last[memory] = stage
    free: list[tuple[int, int]] = []  # (bytes, offset)
    busy: list[tuple[int, int, int]] = []  # (last stage, bytes, offset)
    end = 0
    for memory in sorted(first, key=lambda m: (first[m], m)):
        buffer = plan.buffers[memory]
        size = buffer.row_bytes * (max_tokens if buffer.rows == ROWS_TOKENS else max_rows)
        free += [(n, at) for stage, n, at in busy if stage < first[memory]]
        busy = [entry for entry in busy if entry[0] >= first[memory]]
        fitting = [region for region in free if region[0] >= size]
        if fitting:
            region = min(fitting)
            free.remove(region)
        else:
            region = (size, end)
            end += _round_up(size, _PAGE) + _STAGGER
        buffer.offset = region[1]
        busy.append((last[memory], *region))
    for buffer in plan.buffers:
        buffer.offset = max(plan.buffers[buffer.memory].offset, 0) + buffer.column
    # A slice begins inside a row: its last row, counted whole, ends behind the buffer.
    plan.arena_bytes = end + max((buffer.column for buffer in plan.buffers), default=0)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
