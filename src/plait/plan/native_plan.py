"""A plan in the native library: the structs of a lowered list, the memory that they point to, and one call per step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import EngineError, WeightError
from plait.kernels import abi
from plait.memory.layout import CacheLayout
from plait.plan.lowered import Lowered, MatrixRef, PlanBuffer, PlanOp
from plait.plan.pool import NativePool
from plait.weights.store import VECTOR, PackedWeight, need_library, second_name


class NativePlan:
    """Owns a PlaitPlan, and keeps alive what it points to.

    kv_dtype: "fp32", "bf16" or "fp16". sampled_ids: columns of the logits that may be sampled. host: called with the
    index of a HOST operation when it is due. Raises EngineError where the library refuses the plan.
    """

    def __init__(
        self,
        lowered: Lowered,
        weights: Mapping[str, PackedWeight],
        pool: NativePool,
        kv_dtype: str,
        sampled_ids: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self.lowered = lowered
        self._functions = need_library().functions
        layout = pool.layout
        ops = (abi.Op * len(lowered.ops))(*map(_op, lowered.ops))
        buffers = (abi.Buffer * len(lowered.buffers))(*map(_buffer, lowered.buffers))
        matrices = (abi.Matrix * len(lowered.matrices))(*(_matrix(weights, ref) for ref in lowered.matrices))
        caches = (abi.Cache * len(lowered.caches))(
            *(_cache(pool, lowered, layer, kv_dtype) for layer in lowered.caches)
        )
        tables = np.ascontiguousarray(lowered.tables, np.float32)
        spec = abi.PlanSpec(
            ops=ops,
            buffers=buffers,
            matrices=matrices,
            caches=caches,
            tables=tables.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            num_ops=len(ops),
            num_buffers=len(buffers),
            num_matrices=len(matrices),
            num_caches=len(caches),
            num_table_floats=len(tables),
            max_tokens=max_tokens,
            max_rows=max_rows,
            vocab_size=lowered.vocab_size,
            sampled_ids=sampled_ids,
            copy_slots=layout.group_layers,
            arena_bytes=lowered.arena_bytes,
            pool=pool.address,
            slot_stride=pool.slot_stride,
            block_bytes=layout.layer_bytes,
        )
        # Everything that the plan may still point to when it runs.
        self._kept = (ops, buffers, matrices, caches, tables, pool, [_weight(weights, ref) for ref in lowered.matrices])
        self._plan = self._functions.plait_plan_create(ctypes.byref(spec))
        if not self._plan:
            raise EngineError(f"the native plan could not be made: {self._last_error()}")

    def close(self) -> None:
        """Free the plan; it must not run afterwards."""
        plan, self._plan = self._plan, None
        if plan:
            self._functions.plait_plan_destroy(plan)

    def __del__(self) -> None:
        if getattr(self, "_plan", None):
            self.close()

    def set_adapter(self, number: int, sites: Sequence[abi.AdapterSite]) -> None:
        """Give the plan an adapter (plait_plan_set_adapter); the caller keeps its matrices alive. EngineError where it
        does not fit."""
        array = (abi.AdapterSite * len(sites))(*sites)
        if self._functions.plait_plan_set_adapter(self._plan, number, array, len(sites)) != 0:
            raise EngineError(f"an adapter does not fit the native plan: {self._last_error()}")

    def run(self, step: abi.Step, host: Callable[[int], None]) -> None:
        """One step. Raises EngineError with the library's words where it fails."""
        due, count = 0, len(self.lowered.ops)
        while True:
            due = self._functions.plait_plan_run(self._plan, ctypes.byref(step), due)
            if due >= count:
                return
            if due < 0:
                raise EngineError(f"a step of the native plan failed: {self._last_error()}")
            host(due)
            due += 1
            if due == count:
                return

    def run_steps(
        self,
        step: abi.Step,
        seconds: float,
        stop_ids: NDArray[np.int32],
        interrupt: ctypes.c_int32,
        ids: NDArray[np.int32],
        values: NDArray[np.float32],
    ) -> int:
        """Greedy steps in a row, at most as many as the rows of ids and values [steps, R]; how many were done.

        See plait_plan_run_steps in csrc/plait_native.h. stop_ids: ascending. Raises EngineError where one fails: then
        the others' results do not count either.
        """
        done = self._functions.plait_plan_run_steps(
            self._plan,
            ctypes.byref(step),
            len(ids),
            seconds,
            stop_ids.ctypes.data,
            len(stop_ids),
            ctypes.addressof(interrupt),
            ids.ctypes.data,
            values.ctypes.data,
        )
        if done < 0:
            raise EngineError(f"steps of the native plan failed: {self._last_error()}")
        return int(done)

    def buffer(self, number: int, rows: int, tail: Sequence[int]) -> NDArray[Any]:
        """A view of the first rows of a buffer, float32 or int32 [rows, *tail]."""
        description = self.lowered.buffers[number]
        dtype = np.dtype(np.int32 if description.kind == abi.KIND_I32 else np.float32)
        if not rows:
            return np.empty((0, *tail), dtype)
        address = self._functions.plait_plan_buffer(self._plan, number)
        size = description.row_bytes * (rows - 1) + dtype.itemsize * description.width
        memory = memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
        inner = np.empty(tail, np.int8).strides  # rows do not follow one another without gaps, their numbers do
        strides = (description.row_bytes, *(dtype.itemsize * s for s in inner))
        return np.ndarray((rows, *tail), dtype, memory, strides=strides)

    @property
    def nbytes(self) -> int:
        """Bytes that the plan itself holds: values between operations and scratch."""
        return int(self._functions.plait_plan_bytes(self._plan))

    def profile(self, on: bool = True) -> list[tuple[str, str, float]]:
        """(kind, label, seconds) of each operation since the last call; `on` starts or stops the clocks.

        The time is that of a stage, put on its first operation.
        """
        seconds = np.zeros(len(self.lowered.ops), np.float64)
        self._functions.plait_plan_profile(self._plan, int(on), seconds.ctypes.data)
        return [(op.kind, op.label, float(s)) for op, s in zip(self.lowered.ops, seconds, strict=True)]

    def _last_error(self) -> str:
        return (self._functions.plait_last_error() or b"no reason given").decode()


def _op(op: PlanOp) -> abi.Op:
    # HOST operations may have more operands than a PlaitOp names; the runtime does not look at them.
    struct = abi.Op(kind=abi.OP_KINDS[op.kind])
    struct.inputs[:] = _padded(op.inputs, 3)
    struct.outputs[:] = _padded(op.outputs, 3)
    struct.w[:] = _padded(op.w, 6)
    struct.i[: len(op.i)] = op.i
    struct.f[: len(op.f)] = op.f
    return struct


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (*numbers, *(-1,) * length)[:length]


def _buffer(buffer: PlanBuffer) -> abi.Buffer:
    return abi.Buffer(buffer.offset, buffer.row_bytes, buffer.rows, buffer.kind, buffer.width, 0)


def _matrix(weights: Mapping[str, PackedWeight], ref: MatrixRef) -> abi.Matrix:
    """A weight's descriptor; a slice of its rows begins inside its bytes."""
    weight = _weight(weights, ref)
    matrix = weight.matrix()
    if ref.rows is None:
        return matrix
    start, stop = ref.rows
    if weight.layout == VECTOR:
        matrix.cols, matrix.data = stop - start, matrix.data + 4 * start
    else:
        matrix.rows, matrix.data = stop - start, matrix.data + start // abi.PANEL_ROWS * matrix.panel_bytes
    return matrix


def _weight(weights: Mapping[str, PackedWeight], ref: MatrixRef) -> PackedWeight:
    name = second_name(ref.name) if ref.second else ref.name
    if name not in weights:
        raise WeightError(f"{ref.name} has no second layout in this store: pack the model with plait.weights.pack")
    return weights[name]


def _cache(pool: NativePool, lowered: Lowered, layer: int, kv_dtype: str) -> abi.Cache:
    layout: CacheLayout = pool.layout
    number, _ = layout.slot(layer)
    group = layout.groups[number]
    cache = group.cache
    return abi.Cache(
        base=pool.layer_address(layer),
        block_stride=layout.layer_bytes,
        group=number,
        block_tokens=group.block_tokens,
        num_kv_heads=cache.num_kv_heads,
        key_width=cache.key_width,
        value_width=cache.value_width,
        kv_type=abi.KV_TYPES[kv_dtype],
        latent_width=lowered.latents.get(layer, 0),
        reserved=0,
    )
