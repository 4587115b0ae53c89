"""The executor of the native plan: one call into the library per step. No torch."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import EngineError, UsageError
from plait.kernels import abi
from plait.memory.layout import CacheLayout
from plait.ops.recording import Recording, WeightRef
from plait.ops.step import StepInputs, StepResult
from plait.plan.adapters import PackedAdapters, groups_of
from plait.plan.fusion import fuse, select_early
from plait.plan.host import Host
from plait.plan.lower import lower
from plait.plan.lowered import Lowered
from plait.plan.native_plan import NativePlan
from plait.plan.pool import NativePool
from plait.weights.adapters import Adapter
from plait.weights.store import VECTOR, PackedWeight

KV_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Greedy steps of one call. Blocks are allocated for them ahead, and nothing is heard of before the call returns.
MAX_STEPS = 64


class NativeExecutor:
    """See plait.engine.executor.Executor. Owns the plan and its key/value pool; the weights are the store's.

    sampled_ids: columns of the logits that may be sampled, the others never are best. max_rows: the most rows of a step
    that logits are wanted of (default: max_batched_tokens). kv_dtype must have layout.bytes_per_number bytes.

    compute_s: seconds that the last call spent in the library.
    """

    def __init__(
        self,
        recording: Recording,
        store: Mapping[str, PackedWeight],
        layout: CacheLayout,
        num_blocks: int,
        max_batched_tokens: int,
        *,
        kv_dtype: str = "bf16",
        sampled_ids: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        if kv_dtype not in KV_BYTES:
            raise UsageError(f"kv_dtype {kv_dtype!r} is none of {', '.join(KV_BYTES)}")
        if KV_BYTES[kv_dtype] != layout.bytes_per_number:
            raise UsageError(f"layout has {layout.bytes_per_number} bytes per number, {kv_dtype} {KV_BYTES[kv_dtype]}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_batched_tokens = max_batched_tokens
        self.max_rows = max_batched_tokens if max_rows is None else max_rows
        self.kv_dtype = kv_dtype
        self.compute_s = 0.0
        self._recording = recording
        self.pool = NativePool(layout, num_blocks)
        self._sampled_ids = sampled_ids
        self._adapters: PackedAdapters | None = None
        self._build(store)
        self._logits = np.empty((0, self.vocab_size), np.float32)
        self._hidden: NDArray[np.float32] | None = None
        self._addresses = _Addresses()
        self._best_ids = np.zeros(self.max_rows, np.int32)
        self._best_values = np.zeros(self.max_rows, np.float32)
        self._interrupt = ctypes.c_int32(0)

    @property
    def lowered(self) -> Lowered:
        return self.plan.lowered

    @property
    def host_ops(self) -> tuple[str, ...]:
        """Names of the operations that have no native kernel and run through the reference."""
        return self.lowered.host_ops

    @property
    def max_steps(self) -> int:
        """The most steps of execute_steps(); 1 where the plan has to leave the library in the middle of a step."""
        return 1 if self.host_ops else MAX_STEPS

    def _build(self, store: Mapping[str, PackedWeight]) -> None:
        self._store = store
        self.plan, self._host = self._make(select_early(self._recording))
        self._whole: tuple[NativePlan, Host] | None = None

    def _lower(self, recording: Recording) -> Lowered:
        store = self._store

        def quantised(ref: WeightRef) -> bool:
            return ref.name in store and store[ref.name].layout not in abi.FLOAT_LAYOUTS

        sizes = (self.max_batched_tokens, self.max_rows)
        return lower(fuse(recording, quantised), store, self.layout, *sizes)

    def _make(self, recording: Recording) -> tuple[NativePlan, Host]:
        store, sizes = self._store, (self.max_batched_tokens, self.max_rows)
        lowered = self._lower(recording)
        self.vocab_size = lowered.vocab_size
        self.sampled_ids = min(self.vocab_size if self._sampled_ids is None else self._sampled_ids, self.vocab_size)
        plan = NativePlan(lowered, store, self.pool, self.kv_dtype, self.sampled_ids, *sizes)
        if self._adapters is not None:
            self._adapters.give(plan)
        return plan, Host(plan, store, self.pool, self.kv_dtype)

    def _with_hidden(self) -> tuple[NativePlan, Host]:
        """The plan that gives hidden states of all tokens, made when they are first asked for.

        The plan for everything else has none: it leaves the tokens without logits behind after the last attention.
        """
        if self._whole is None:
            self._whole = self._make(self._recording)
        return self._whole

    def set_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Take these in place of what there was; steps name them by 1, 2, ... in this order. Their numbers are copied.

        Steps and rows without an adapter compute what they would without any. Raises UsageError for an adapter of what
        has no native kernel; nothing has changed then.
        """
        plans = [self.plan, *(() if self._whole is None else self._whole[:1])]
        lowered = [plan.lowered for plan in plans] + ([self._lower(self._recording)] if self._whole is None else [])
        half = any(weight.layout not in (*abi.FLOAT_LAYOUTS, VECTOR) for weight in self._store.values())
        packed = PackedAdapters(adapters, (group for low in lowered for group in groups_of(low).values()), half)
        for plan in plans:
            packed.check(plan)
        for plan in plans:
            before = 0 if self._adapters is None else len(self._adapters.names)
            packed.give(plan)
            for number in range(len(adapters) + 1, before + 1):
                plan.set_adapter(number, [])
        self._adapters = packed

    def prepare_hidden(self) -> None:
        """Make what the first step with hidden states would make. EngineError or MemoryError where it does not fit."""
        self._with_hidden()

    def refresh(self, store: Mapping[str, PackedWeight] | None = None) -> None:
        """Take new weights: another store, or (None) new numbers in the standing one. The pool keeps what it has."""
        old = [self.plan, *(() if self._whole is None else self._whole[:1])]
        self._build(self._store if store is None else store)
        for plan in old:
            plan.close()

    def execute(
        self, token_ids: NDArray[np.int32], inputs: StepInputs, *, logits: bool = True, hidden: bool = False
    ) -> StepResult:
        """Run one step: token_ids int32 [N], inputs.sequences with a block table, inputs.logit_rows int32 [R].

        The result's arrays are valid until the next step. Raises EngineError for a step that is larger than the plan or
        points outside the vocabulary or the pool.
        """
        arrays = self._arrays(token_ids, inputs)
        ids, rows = arrays[0], arrays[-1]
        plan, host_ops = self._with_hidden() if hidden else (self.plan, self._host)
        positions = None  # the library counts them
        if inputs.positions is not None or plan.lowered.host_ops:
            assert inputs.sequences is not None
            positions = _int32(inputs.sequences.positions() if inputs.positions is None else inputs.positions)
            if positions.shape != (len(ids),):
                raise EngineError(f"a step of {len(ids)} tokens with positions {positions.shape}")
        n, r = len(ids), len(rows)
        logits_out = hidden_out = None
        if logits:
            self._logits = logits_out = _room(self._logits, r, self.vocab_size)
            logits_out = logits_out[:r]
        if hidden:
            self._hidden = hidden_out = _room(self._hidden, n, plan.lowered.hidden_size)
            hidden_out = hidden_out[:n]
        best_ids, best_values = self._best_ids[:r], self._best_values[:r]
        step = self._struct(*arrays)
        step.adapter_ids = self._adapter_ids(inputs)
        if positions is not None:
            step.positions = self._addresses.of("positions", positions)
        if logits_out is not None:
            step.logits = logits_out.ctypes.data
        if hidden_out is not None:
            step.hidden = hidden_out.ctypes.data

        def host(index: int) -> None:
            known: dict[str, Any] = {
                "ids": ids,
                "positions": positions,
                "reach": inputs.reach,
                "logit_rows": rows,
                "logits": np.empty(0, np.float32) if logits_out is None else logits_out,
                "best_ids": best_ids,
                "best_values": best_values,
                "sampled_ids": self.sampled_ids,
            }
            host_ops.run(index, known, inputs)

        began = time.perf_counter()
        plan.run(step, host)
        self.compute_s = time.perf_counter() - began
        return StepResult(best_ids, best_values, logits_out, hidden_out)

    def execute_steps(
        self,
        token_ids: NDArray[np.int32],
        inputs: StepInputs,
        steps: int,
        seconds: float,
        stop_ids: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Up to `steps` greedy steps of R sequences that all decode, the first as execute() would do it without logits.

        inputs: the first step, with a block table for all of them. No step is begun when `seconds` have passed, after
        one that chose an id of stop_ids (int32, ascending) or whose best values are not all finite, or after
        interrupt(). Returns best ids int32 and values float32 [done, R], done >= 1. Raises EngineError as execute()
        does, and where max_steps does not allow it.
        """
        if not 1 <= steps <= self.max_steps:
            raise EngineError(f"{steps} steps in a row: 1 to {self.max_steps} can be had")
        if inputs.positions is not None:
            raise UsageError("steps in a row take no positions")
        arrays = self._arrays(token_ids, inputs)
        rows = len(arrays[0])
        ids, values = np.empty((steps, rows), np.int32), np.empty((steps, rows), np.float32)
        step = self._struct(*arrays)
        step.adapter_ids = self._adapter_ids(inputs)
        began = time.perf_counter()
        try:
            done = self.plan.run_steps(step, seconds, _int32(stop_ids), self._interrupt, ids, values)
        finally:
            # Not at the beginning: what was set since the caller last looked must end this call, too early at worst.
            self._interrupt.value = 0
            self.compute_s = time.perf_counter() - began
        return ids[:done], values[:done]

    def interrupt(self) -> None:
        """Let execute_steps() return after the step it is in; if it does not run now, its next call makes one step.
        From any thread."""
        self._interrupt.value = 1

    def _arrays(self, token_ids: NDArray[np.int32], inputs: StepInputs) -> tuple[NDArray[np.int32], ...]:
        """token_ids, query_start, context_len, block_table, copies and logit_rows, as the library takes them.

        Checks the shapes that the library takes for granted; it checks what the numbers point to itself.
        """
        sequences = inputs.sequences
        if sequences is None or sequences.block_table is None or inputs.logit_rows is None:
            raise UsageError("the native plan needs sequences with a block table, and logit_rows")
        for name in ("token_mask", "segment_ids"):
            if getattr(inputs, name) is not None:
                raise UsageError(f"the native plan takes no {name}")
        ids, rows = _int32(token_ids), _int32(inputs.logit_rows)
        start, context = _int32(sequences.query_start), _int32(sequences.context_len)
        table, copies = _int32(sequences.block_table), _int32(sequences.copies)
        n, s = len(ids), len(context)
        if table.shape[:2] != (len(self.layout.groups), s) or start.shape != (s + 1,):
            raise EngineError(f"a step of {n} tokens, {s} sequences: table {table.shape}, bounds {start.shape}")
        if copies.shape[1:] != (2,) or context.ndim != 1:
            raise EngineError(f"a step with copies {copies.shape} and context lengths {context.shape}")
        return ids, start, context, table, copies, rows

    def _adapter_ids(self, inputs: StepInputs) -> int | None:
        """Address of the step's adapter numbers. The library checks what they are."""
        if inputs.adapter_ids is None:
            return None
        numbers, sequences = _int32(inputs.adapter_ids), inputs.sequences
        if sequences is None or numbers.shape != (sequences.count,):
            raise EngineError(f"a step with adapter_ids {numbers.shape} for its sequences")
        return self._addresses.of("adapters", numbers)

    def _struct(
        self,
        ids: NDArray[np.int32],
        start: NDArray[np.int32],
        context: NDArray[np.int32],
        table: NDArray[np.int32],
        copies: NDArray[np.int32],
        rows: NDArray[np.int32],
    ) -> abi.Step:
        """A step that gives best ids and values; no positions, logits or hidden states."""
        address = self._addresses.of
        return abi.Step(
            num_tokens=len(ids),
            num_sequences=len(context),
            num_rows=len(rows),
            num_groups=table.shape[0],
            table_width=table.shape[2],
            num_copies=len(copies),
            token_ids=address("ids", ids),
            query_start=address("start", start),
            context_len=address("context", context),
            block_table=address("table", table),
            copies=address("copies", copies) if len(copies) else None,
            logit_rows=address("rows", rows),
            best_ids=address("best_ids", self._best_ids),
            best_values=address("best_values", self._best_values),
        )

    @property
    def plan_bytes(self) -> int:
        """Bytes of the plan's own buffers and scratch; neither the weights nor the pool, nor the adapters."""
        return self.plan.nbytes + (0 if self._whole is None else self._whole[0].nbytes)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the packed adapters."""
        return 0 if self._adapters is None else self._adapters.nbytes

    def profile(self, on: bool = True) -> list[tuple[str, str, float]]:
        """(kind, label, seconds) of each operation since the last call; `on` starts or stops the clocks."""
        return self.plan.profile(on)

    def read_block(self, block: int) -> bytes:
        """The bytes of a block, in the order that `write_block` takes."""
        return self.pool.read_block(block)

    def write_block(self, block: int, data: bytes) -> None:
        """Put back what `read_block` gave."""
        self.pool.write_block(block, data)

    def touched_bytes(self) -> int | None:
        """Bytes of the pool that lie in memory now; None where the platform does not say."""
        return self.pool.touched_bytes()


def _room(array: NDArray[np.float32] | None, rows: int, width: int) -> NDArray[np.float32]:
    """A standing array, or a larger one in its place."""
    return array if array is not None and len(array) >= rows else np.empty((rows, width), np.float32)


class _Addresses:
    """Addresses of arrays by what they are for. Most arrays of a step are those of the step before, and asking NumPy
    for an address takes longer than comparing two objects."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[NDArray[Any], int]] = {}

    def of(self, name: str, array: NDArray[Any]) -> int:
        known = self._known.get(name)
        if known is None or known[0] is not array:  # the array is kept, so that no other one gets its place
            known = self._known[name] = (array, array.ctypes.data)
        return known[1]


def _int32(array: Any) -> NDArray[np.int32]:
    if type(array) is np.ndarray and array.dtype == np.int32 and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, np.int32)
