"""Plans built by hand for tests: buffers that share no memory, so that every value of a step can be read afterwards."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plait.kernels import abi, native
from tests.kernels import quant_model
from tests.kernels.quant_model import aligned

TOKENS, LOGITS = abi.ROWS_TOKENS, abi.ROWS_LOGITS


def functions() -> Any:
    """The library's C functions."""
    library = native.native_library()
    assert library is not None
    return library.functions


def last_error() -> str:
    return functions().plait_last_error().decode()


def record_values(records: np.ndarray, width: int) -> np.ndarray:
    """What quantised rows (uint8 [rows, bytes]) stand for, float64 [rows, width]."""
    return quant_model.Records(records, width).values()


@dataclass
class Steps:
    """One step's arrays and their struct. Tables: int32 [G, S, B]; wants: which of the outputs are given memory."""

    ids: list[int]
    start: list[int]
    context: list[int]
    table: np.ndarray
    rows: list[int]
    vocab: int
    width: int
    pairs: list[tuple[int, int]] = field(default_factory=list)
    want_logits: bool = True
    want_hidden: bool = True

    def __post_init__(self) -> None:
        starts = zip(self.start, self.start[1:], self.context, strict=False)
        positions = [context - (end - start) + j for start, end, context in starts for j in range(end - start)]
        int32 = lambda values: np.array(values, np.int32)  # noqa: E731
        self.arrays = {
            "token_ids": int32(self.ids),
            "positions": int32(positions),
            "query_start": int32(self.start),
            "context_len": int32(self.context),
            "block_table": np.ascontiguousarray(self.table, np.int32),
            "copies": int32(self.pairs).reshape(-1, 2),
            "logit_rows": int32(self.rows),
            "logits": np.full((len(self.rows), self.vocab), np.nan, np.float32),
            "best_ids": np.full(len(self.rows), -7, np.int32),
            "best_values": np.full(len(self.rows), np.nan, np.float32),
            "hidden": np.full((len(self.ids), self.width), np.nan, np.float32),
        }
        self.struct = abi.Step(
            num_tokens=len(self.ids),
            num_sequences=len(self.context),
            num_rows=len(self.rows),
            num_groups=self.table.shape[0],
            table_width=self.table.shape[2],
            num_copies=len(self.pairs),
            **{name: array.ctypes.data for name, array in self.arrays.items()},
        )
        if not self.want_logits:
            self.struct.logits = None
        if not self.want_hidden:
            self.struct.hidden = None

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["arrays"][name]
        except KeyError:
            raise AttributeError(name) from None


class Builder:
    """Collects the parts of a specification; `create` makes the plan."""

    def __init__(self, max_tokens: int, max_rows: int, vocab: int, sampled: int | None = None) -> None:
        self.spec = abi.PlanSpec(
            max_tokens=max_tokens,
            max_rows=max_rows,
            vocab_size=vocab,
            sampled_ids=vocab if sampled is None else sampled,
        )
        self.buffers: list[abi.Buffer] = []
        self.matrices: list[abi.Matrix] = []
        self.values: list[np.ndarray] = []  # of every matrix, float32 [rows, cols]
        self.ops: list[abi.Op] = []
        self.caches: list[abi.Cache] = []
        self.tables = np.zeros(0, np.float32)
        self.arena_bytes = 0
        self.keep: list[Any] = []

    def buffer(self, width: int, rows: int = TOKENS, kind: int = abi.KIND_F32) -> int:
        count = self.spec.max_rows if rows == LOGITS else self.spec.max_tokens
        row_bytes = functions().plait_quantised_row_bytes(width) if kind == abi.KIND_Q8 else 4 * width
        self.buffers.append(abi.Buffer(self.arena_bytes, row_bytes, rows, kind, width, 0))
        self.arena_bytes += -(-count * row_bytes // 64) * 64
        return len(self.buffers) - 1

    def part(self, buffer: int, column: int, width: int) -> int:
        """`width` columns of a buffer of floats, from `column` on (a multiple of 16)."""
        whole = self.buffers[buffer]
        self.buffers.append(abi.Buffer(whole.offset + 4 * column, whole.row_bytes, whole.rows, whole.kind, width, 0))
        return len(self.buffers) - 1

    def matrix(self, rng: np.random.Generator, rows: int, cols: int, layout: str, scale: float = 0.1) -> int:
        """A random matrix in any layout."""
        if layout in abi.FLOAT_LAYOUTS:
            values = (rng.standard_normal((rows, cols)) * scale).astype(np.float32)
            packed = quant_model.pack(values, "F32", layout, cols)
            values = quant_model.unpack(packed)
        else:
            blocks = quant_model.random_blocks(rng, layout, rows, cols)
            packed, values = quant_model.pack(blocks, layout, layout, cols), quant_model.dequantise(layout, blocks)
        self.keep.append(packed)
        self.matrices.append(packed.matrix)
        self.values.append(values)
        return len(self.matrices) - 1

    def vector(self, values: np.ndarray) -> int:
        data = aligned(4 * values.size).view(np.float32)
        data[:] = values
        self.keep.append(data)
        self.matrices.append(abi.Matrix(abi.LAYOUT_VECTOR, 0, 1, values.size, 4 * values.size, data.ctypes.data))
        self.values.append(data[None])
        return len(self.matrices) - 1

    def op(
        self,
        kind: str,
        inputs: list[int] | int = (),
        outputs: list[int] | int = (),
        w: list[int] | int = (),
        i: tuple[int, ...] = (),
        f: tuple[float, ...] = (),
    ) -> abi.Op:
        def filled(numbers: Any, count: int) -> list[int]:
            listed = [numbers] if isinstance(numbers, int) else list(numbers)
            return listed + [-1] * (count - len(listed))

        op = abi.Op(abi.OP_KINDS[kind])
        op.inputs[:], op.outputs[:], op.w[:] = filled(inputs, 3), filled(outputs, 3), filled(w, 6)
        op.i[: len(i)], op.f[: len(f)] = i, f
        self.ops.append(op)
        return op

    def create(self) -> Plan:
        """Raises ValueError with the library's words where it refuses."""
        spec = self.spec
        spec.ops = (abi.Op * len(self.ops))(*self.ops)
        spec.buffers = (abi.Buffer * len(self.buffers))(*self.buffers)
        spec.matrices = (abi.Matrix * len(self.matrices))(*self.matrices)
        spec.caches = (abi.Cache * len(self.caches))(*self.caches)
        spec.tables = self.tables.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        spec.num_ops, spec.num_buffers, spec.num_matrices = len(self.ops), len(self.buffers), len(self.matrices)
        spec.num_caches, spec.num_table_floats, spec.arena_bytes = len(self.caches), self.tables.size, self.arena_bytes
        handle = functions().plait_plan_create(ctypes.byref(spec))
        if not handle:
            raise ValueError(last_error())
        return Plan(self, handle)


class Plan:
    def __init__(self, builder: Builder, handle: int) -> None:
        self.builder, self.handle = builder, handle

    def __del__(self) -> None:
        functions().plait_plan_destroy(self.handle)

    def run(self, step: Steps, start: int = 0) -> int:
        """Raises ValueError with the library's words where it refuses."""
        done = functions().plait_plan_run(self.handle, ctypes.byref(step.struct), start)
        if done < 0:
            raise ValueError(last_error())
        return done

    def rows(self, buffer: int, count: int) -> np.ndarray:
        """The first rows of a buffer: float32 [count, width], or what quantised rows stand for in float64."""
        found = self.builder.buffers[buffer]
        address = functions().plait_plan_buffer(self.handle, buffer)
        data = np.frombuffer((ctypes.c_uint8 * (count * found.row_bytes)).from_address(address), np.uint8)
        data = data.reshape(count, found.row_bytes)
        if found.kind == abi.KIND_Q8:
            return record_values(data, found.width)
        return data.view(np.float32)[:, : found.width]
