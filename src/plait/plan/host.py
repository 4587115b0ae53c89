"""Operations of a plan that have no native form: computed with the reference, on the plan's own buffers.

torch is imported when the first of them is due, never before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import EngineError
from plait.kernels.abi import ROWS_LOGITS
from plait.ops.recording import WeightRef
from plait.ops.step import StepInputs
from plait.plan.lowered import HostCall, HostOperand
from plait.plan.native_plan import NativePlan
from plait.plan.pool import NativePool
from plait.weights.store import PackedWeight, need_library


class Host:
    """Computes the HOST operations of one plan.

    A layer whose attention runs here keeps its keys and values in the reference's own order, in the same pool. Weights
    are expanded once, when first used, and kept. Activations are fp32.
    """

    def __init__(self, plan: NativePlan, weights: Mapping[str, PackedWeight], pool: NativePool, kv_dtype: str) -> None:
        self._plan = plan
        self._weights = weights
        self._pool = pool
        self._kv_dtype = kv_dtype
        self._expanded: dict[WeightRef, Any] = {}
        self._began = False

    def run(self, index: int, arrays: Mapping[str, NDArray[Any]], inputs: StepInputs) -> None:
        """Operation `index` of the plan. arrays: those of the step by name (ids, positions, logit_rows, and what
        `store_logits` fills)."""
        import torch

        from plait.ops.interpreter import attributes
        from plait.plan.fused import references

        if not self._began:
            # torch's own threads wait beside those of the plan: no more of them than the user gave the plan.
            torch.set_num_threads(min(torch.get_num_threads(), need_library().threads()))
            self._began = True
        call = self._plan.lowered.host[index]
        if call.op.name == "store_logits":
            self._store_logits(call, arrays)
            return
        functions = references()
        function = functions.get(call.op.name)
        if function is None:
            raise EngineError(f"operation {call.op.name} has neither a native kernel nor a reference")
        with torch.inference_mode():
            operands = [torch.from_numpy(self._array(operand, arrays)) for operand in call.inputs]
            weights = [None if ref is None else self._weight(ref) for ref in call.op.weights]
            attrs = attributes(call.op)
            if call.op.name in ("attend", "attend_latent"):
                attrs["memory"] = self._memory(attrs["layer"], inputs)
            result = function(*operands, *weights, **attrs)
            results = result if isinstance(result, tuple) else (result,)
            for operand, tensor in zip(call.outputs, results, strict=True):
                target = self._array(operand, arrays)
                target[...] = tensor.to(torch.float32 if target.dtype == np.float32 else torch.int32).numpy()

    def _array(self, operand: HostOperand, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """An operand as it lies in the plan, or an array of the step; integers that index are int64."""
        if operand.buffer < 0:
            return np.asarray(arrays[operand.step], np.int64)
        rows = "logit_rows" if self._plan.lowered.buffers[operand.buffer].rows == ROWS_LOGITS else "ids"
        return self._plan.buffer(operand.buffer, len(arrays[rows]), operand.tail)

    def _weight(self, ref: WeightRef) -> Any:
        import torch

        if ref not in self._expanded:
            numbers = torch.from_numpy(self._weights[ref.name].expand())
            self._expanded[ref] = numbers if ref.rows is None else numbers[ref.rows[0] : ref.rows[1]]
        return self._expanded[ref]

    def _memory(self, layer: int, inputs: StepInputs) -> Any:
        """A step over one layer's part of the pool, in the reference's layout."""
        import torch

        from plait.memory.paged_step import PagedStep, slot_views

        layout = self._pool.layout
        number, slot = layout.slot(layer)
        group = layout.groups[number]
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self._kv_dtype]
        numbers = torch.from_numpy(self._pool.pages[slot]).view(dtype)
        assert inputs.sequences is not None
        return PagedStep(layout, {layer: (number, *slot_views(numbers, group))}, inputs.sequences, torch.device("cpu"))

    def _store_logits(self, call: HostCall, arrays: Mapping[str, NDArray[Any]]) -> None:
        """What the native LOGITS does, for logits that something else was done to."""
        (operand,) = call.inputs
        logits = self._array(operand, arrays)
        sampled = logits[:, : int(arrays["sampled_ids"])]
        best = sampled.argmax(1)  # the first of equals
        arrays["best_ids"][...] = best
        values = np.take_along_axis(sampled, best[:, None], 1)[:, 0]
        arrays["best_values"][...] = np.where(np.isnan(sampled).any(1), np.nan, values)
        if arrays["logits"].size:
            arrays["logits"][...] = logits
