"""Lowering: a recording becomes descriptors of native operations over buffers, matrices and caches. No torch.

The runtime hands out the rows of operations that work on each row alone in chunks, and runs a *stage* of several such
operations on a chunk without waiting for other threads; every other operation is a stage of its own, with barriers
around it. That decides what memory may be reused: a value's bytes are free for what is written after the barrier that
follows its last reader.

What has no native form, or one outside the kernels' limits, becomes a HOST operation: the runtime returns there and
plait.plan.host computes it with the reference. `Lowered.host_ops` names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from plait.errors import RecordingError
from plait.memory.layout import CacheLayout
from plait.ops.recording import Op, Recording
from plait.plan.arena import assign_memory
from plait.plan.lower_ops import NATIVE
from plait.plan.lowered import Lowered
from plait.plan.lowering import Lowering
from plait.weights.store import PackedWeight


def lower(
    recording: Recording, weights: Mapping[str, PackedWeight], layout: CacheLayout, max_tokens: int, max_rows: int
) -> Lowered:
    """The plan of a recording, fused or not, over packed weights.

    max_tokens, max_rows: the most flat tokens and logit rows of a step. Raises WeightError naming a weight that is not
    in the store or has another shape, RecordingError for a value that is neither per token nor per logit row.
    """
    low = Lowering(recording, weights, layout)
    for op in recording.ops:
        function = NATIVE.get(op.name)
        if function is None or not function(low, op):
            low.host(op)
        _give_outputs(low, op)
    low.out.tables = np.array(low.frequencies, np.float32)
    low.out.matrices = list(low.matrix_numbers)
    low.out.caches = list(low.cache_numbers)
    assign_memory(low.out, max_tokens, max_rows)
    return low.out


def _give_outputs(low: Lowering, op: Op) -> None:
    """Hand the recording's outputs to the step as soon as they are there."""
    outputs = low.recording.outputs
    for name, value in outputs.items():
        if value not in op.outputs:
            continue
        if name == "hidden":
            buffer = low.plain[low.root(value)]
            low.out.hidden_size = low.out.buffers[buffer].width
            low.emit("hidden", op, (buffer,))
        elif name == "logits":
            low.out.vocab_size = prod(low.tail(value))
            if low.root(value) in low.plain:
                # Something came after the product with the head: the host finds the best and stores the logits.
                low.host(Op("store_logits", (value,), ()))
        else:
            raise RecordingError(f"a native plan has no output {name!r}; it gives hidden and logits")
