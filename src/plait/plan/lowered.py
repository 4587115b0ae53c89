"""What a recording is lowered to: operations, buffers, matrices and caches, all but the addresses. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plait.kernels.abi import KIND_Q8
from plait.ops.recording import Op

# Buffers and records begin at multiples of this.
ALIGNMENT = 64
# Operations that a thread may run on a few rows without the others (csrc/plan_check.cpp has the same list).
ROW_LOCAL = frozenset(
    (
        *("embed", "positions", "rms_norm", "layer_norm", "rotate", "write_kv", "gate", "activate"),
        *("add", "scale", "soft_cap", "clip", "quantise", "copy", "hidden", "route"),
    )
)


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
    """A weight of the store, or the rows (start, stop) of it; second: its second layout (plait.weights.latent)."""

    name: str
    rows: tuple[int, int] | None = None
    second: bool = False


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

    latents: model layer -> how many numbers of its cached rows are the latent. host: index into ops -> what to compute
    there.
    """

    ops: list[PlanOp] = field(default_factory=list)
    buffers: list[PlanBuffer] = field(default_factory=list)
    matrices: list[MatrixRef] = field(default_factory=list)
    caches: list[int] = field(default_factory=list)
    latents: dict[int, int] = field(default_factory=dict)
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


def quantised_row_bytes(width: int) -> int:
    """Bytes of a quantised record: int8 q[width], f32 scale[width / 32], f32 sum[width / 16], padded to 64."""
    return round_up(width + width // 32 * 4 + width // 16 * 4, ALIGNMENT)


def row_size(kind: int, width: int) -> int:
    """Bytes from one row of `width` numbers to the next."""
    return quantised_row_bytes(width) if kind == KIND_Q8 else round_up(4 * width, ALIGNMENT)


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
