"""The executor of the native plan: one call into the library per step. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import EngineError, UsageError
from plait.kernels import abi
from plait.memory.layout import CacheLayout
from plait.ops.recording import Recording, WeightRef
from plait.ops.step import StepInputs, StepResult
from plait.plan.fusion import fuse, select_early
from plait.plan.host import Host
from plait.plan.lower import Lowered, lower
from plait.plan.native_plan import NativePlan
from plait.plan.pool import NativePool
from plait.weights.store import PackedWeight

KV_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class NativeExecutor:
    """See plait.engine.executor.Executor. Owns the plan and its key/value pool; the weights are the store's.

    sampled_ids: columns of the logits that may be sampled, the others never are best. max_rows: the most rows of a step
    that logits are wanted of (default: max_batched_tokens). kv_dtype must have layout.bytes_per_number bytes.

    compute_s: seconds that the last step spent in the library.
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
        self._build(store)
        self._logits = np.empty((0, self.vocab_size), np.float32)
        self._hidden: NDArray[np.float32] | None = None
        self._addresses = _Addresses()
        self._best_ids = np.zeros(self.max_rows, np.int32)
        self._best_values = np.zeros(self.max_rows, np.float32)

    @property
    def lowered(self) -> Lowered:
        return self.plan.lowered

    @property
    def host_ops(self) -> tuple[str, ...]:
        """Names of the operations that have no native kernel and run through the reference."""
        return self.lowered.host_ops

    def _build(self, store: Mapping[str, PackedWeight]) -> None:
        self._store = store
        self.plan, self._host = self._make(select_early(self._recording))
        self._whole: tuple[NativePlan, Host] | None = None

    def _make(self, recording: Recording) -> tuple[NativePlan, Host]:
        store = self._store

        def quantised(ref: WeightRef) -> bool:
            return ref.name in store and store[ref.name].layout not in abi.FLOAT_LAYOUTS

        sizes = (self.max_batched_tokens, self.max_rows)
        lowered = lower(fuse(recording, quantised), store, self.layout, *sizes)
        self.vocab_size = lowered.vocab_size
        self.sampled_ids = min(self.vocab_size if self._sampled_ids is None else self._sampled_ids, self.vocab_size)
        plan = NativePlan(lowered, store, self.pool, self.kv_dtype, self.sampled_ids, *sizes)
        return plan, Host(plan, store, self.pool, self.kv_dtype)

    def _with_hidden(self) -> tuple[NativePlan, Host]:
        """The plan that gives hidden states of all tokens, made when they are first asked for.

        The plan for everything else has none: it leaves the tokens without logits behind after the last attention.
        """
        if self._whole is None:
            self._whole = self._make(self._recording)
        return self._whole

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
        sequences = inputs.sequences
        if sequences is None or sequences.block_table is None or inputs.logit_rows is None:
            raise UsageError("the native plan needs sequences with a block table, and logit_rows")
        for name in ("token_mask", "segment_ids", "adapter_ids"):
            if getattr(inputs, name) is not None:
                raise UsageError(f"the native plan takes no {name}")
        ids = _int32(token_ids)
        rows = _int32(inputs.logit_rows)
        plan, host_ops = self._with_hidden() if hidden else (self.plan, self._host)
        positions = None  # the library counts them
        if inputs.positions is not None or plan.lowered.host_ops:
            positions = _int32(sequences.positions() if inputs.positions is None else inputs.positions)
        start, context = _int32(sequences.query_start), _int32(sequences.context_len)
        table, copies = _int32(sequences.block_table), _int32(sequences.copies)
        self._check(ids, positions, start, context, table, copies)
        n, r = len(ids), len(rows)
        logits_out = hidden_out = None
        if logits:
            self._logits = logits_out = _room(self._logits, r, self.vocab_size)
            logits_out = logits_out[:r]
        if hidden:
            self._hidden = hidden_out = _room(self._hidden, n, plan.lowered.hidden_size)
            hidden_out = hidden_out[:n]
        best_ids, best_values = self._best_ids[:r], self._best_values[:r]
        address = self._addresses.of
        step = abi.Step(
            n,
            len(context),
            r,
            table.shape[0],
            table.shape[2],
            len(copies),
            address("ids", ids),
            None if positions is None else address("positions", positions),
            address("start", start),
            address("context", context),
            address("table", table),
            address("copies", copies) if len(copies) else None,
            address("rows", rows),
            None if logits_out is None else logits_out.ctypes.data,
            address("best_ids", self._best_ids),
            address("best_values", self._best_values),
            None if hidden_out is None else hidden_out.ctypes.data,
        )

        def host(index: int) -> None:
            arrays: dict[str, Any] = {
                "ids": ids,
                "positions": positions,
                "logit_rows": rows,
                "logits": np.empty(0, np.float32) if logits_out is None else logits_out,
                "best_ids": best_ids,
                "best_values": best_values,
                "sampled_ids": self.sampled_ids,
            }
            host_ops.run(index, arrays, inputs)

        began = time.perf_counter()
        plan.run(step, host)
        self.compute_s = time.perf_counter() - began
        return StepResult(best_ids, best_values, logits_out, hidden_out)

    def _check(
        self,
        ids: NDArray[np.int32],
        positions: NDArray[np.int32] | None,
        start: NDArray[np.int32],
        context: NDArray[np.int32],
        table: NDArray[np.int32],
        copies: NDArray[np.int32],
    ) -> None:
        """The shapes that the library takes for granted; it checks what the numbers point to itself."""
        n, s = len(ids), len(context)
        if table.shape[:2] != (len(self.layout.groups), s) or start.shape != (s + 1,):
            raise EngineError(f"a step of {n} tokens, {s} sequences: table {table.shape}, bounds {start.shape}")
        if positions is not None and positions.shape != (n,):
            raise EngineError(f"a step of {n} tokens with positions {positions.shape}")
        if copies.shape[1:] != (2,) or context.ndim != 1:
            raise EngineError(f"a step with copies {copies.shape} and context lengths {context.shape}")

    @property
    def plan_bytes(self) -> int:
        """Bytes of the plan's own buffers and scratch; neither the weights nor the pool."""
        return self.plan.nbytes + (0 if self._whole is None else self._whole[0].nbytes)

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
