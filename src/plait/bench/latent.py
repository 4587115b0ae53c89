"""Where the two forms of latent attention cost the same: each of them measured on the native plan.

A step of one sequence over a cache of one layer, with a model's own weights or with random ones; what is timed is the
operation alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import plait
from plait.bench.limits import origin
from plait.errors import UsageError
from plait.kernels import abi
from plait.memory.layout import make_layout
from plait.ops.latent import expands
from plait.ops.spec import LatentSpec, LayerCache
from plait.plan.arena import assign_memory
from plait.plan.lower_ops import ATTEND_COST
from plait.plan.lowered import Lowered, MatrixRef, PlanBuffer, PlanOp, row_size
from plait.plan.native_plan import NativePlan
from plait.plan.pool import NativePool
from plait.weights.fill import Source, fill
from plait.weights.latent import fits, make_second
from plait.weights.store import PackedWeight, aligned_bytes, need_library, packed_bytes, second_name

# DeepSeek-V2-Lite's, for whoever names no model.
WIDTHS = LatentSpec(16, 512, 128, 64, 128, 192**-0.5)
CONTEXTS = (512, 4096)
MOST_TOKENS = 512
FORMS = ("expanded", "absorbed")
KV_DTYPES = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}
# Runs of a measurement that count.
_RUNS = 5


class Layer:
    """One form over a full cache of random rows, in steps of `tokens` tokens of a context of `context`."""

    def __init__(
        self, spec: LatentSpec, form: str, weights: Sequence[PackedWeight], kv_dtype: str, context: int
    ) -> None:
        self.context = context
        most = min(MOST_TOKENS, context)
        size = np.dtype(KV_DTYPES[kv_dtype]).itemsize
        layout = make_layout([LayerCache(1, spec.row_width, 0)], size, context_tokens=context, chunk_tokens=most)
        blocks = layout.blocks_per_sequence(context)
        pool = NativePool(layout, blocks + 1)
        random = np.random.default_rng(0)
        rows = random.standard_normal(pool.pages.size // size).astype(np.float32)
        bits = rows.view(np.uint32) >> 16 if kv_dtype == "bf16" else rows
        pool.pages.reshape(-1)[:] = bits.astype(KV_DTYPES[kv_dtype]).view(np.uint8)
        widths = (
            spec.num_heads * spec.key_width,
            spec.latent_width,
            spec.rope_width,
            spec.num_heads * spec.value_width,
        )
        buffers = [
            PlanBuffer(abi.ROWS_TOKENS, abi.KIND_F32, width, row_size(abi.KIND_F32, width), number)
            for number, width in enumerate(widths)
        ]
        i = (0, spec.num_heads, spec.nope_width, spec.value_width, abi.LATENT_FORMS[form])
        ops = [
            PlanOp("write_kv", (1, 2), i=(0,)),
            PlanOp("attend_latent", (0,), (3,), (0, 1), i, (spec.scale, ATTEND_COST)),
        ]
        name = weights[0].name
        matrices = [MatrixRef(name), MatrixRef(name, second=True)]
        lowered = Lowered(ops, buffers, matrices, [0], {0: spec.latent_width}, vocab_size=1)
        assign_memory(lowered, most, 1)
        self._plan = NativePlan(lowered, {w.name: w for w in weights}, pool, kv_dtype, 1, most, 1)
        for number, width in enumerate(widths[:3]):
            self._plan.buffer(number, most, (width,))[...] = random.standard_normal((most, width))
        self._table = np.arange(1, blocks + 1, dtype=np.int32)

    def seconds(self, tokens: int) -> float:
        """The median of some runs of the operation."""
        ids, start = np.zeros(tokens, np.int32), np.array([0, tokens], np.int32)
        context = np.array([self.context], np.int32)
        step = abi.Step(
            num_tokens=tokens,
            num_sequences=1,
            num_groups=1,
            table_width=len(self._table),
            token_ids=ids.ctypes.data,
            query_start=start.ctypes.data,
            context_len=context.ctypes.data,
            block_table=self._table.ctypes.data,
        )
        times = []
        for _ in range(_RUNS + 1):
            self._plan.profile()
            self._plan.run(step, lambda index: None)
            times.append(self._plan.profile(False)[1][2])
        return median(times[1:])


def model_layer(path: Path) -> tuple[LatentSpec, tuple[PackedWeight, PackedWeight]]:
    """The first latent attention of a model, and its weight in both layouts. UsageError where there is none."""
    from plait.plan.load import load_native

    model = load_native(path)
    for op in model.recording.ops:
        if op.name == "attend_latent":
            spec, ref = LatentSpec(**op.attrs["spec"]), op.weights[0]
            if ref is None or not fits(spec):
                raise UsageError(f"{path}: the kernels do not take the widths of its latent attention, {spec}")
            return spec, (model.store[ref.name], model.store[second_name(ref.name)])
    raise UsageError(f"{path}: a {model.config.model_type} model has no latent attention")


def random_layer(spec: LatentSpec = WIDTHS) -> tuple[LatentSpec, tuple[PackedWeight, PackedWeight]]:
    """Random weights of these widths in BF16."""
    shape = (spec.num_heads * (spec.nope_width + spec.value_width), spec.latent_width)
    numbers = np.random.default_rng(1).standard_normal(shape).astype(np.float32) * np.float32(spec.latent_width**-0.5)
    weight = PackedWeight("kv_b", shape, "BF16", aligned_bytes(packed_bytes("BF16", shape)))
    fill(weight, Source("F32", numbers.ctypes.data, numbers.strides[0]), None, 1)
    return spec, (weight, make_second(weight, spec, 1))


def crossing(tokens: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Where expanded / absorbed falls to 1, on logarithmic axes; None where it stays on one side.

    tokens ascend; ratios: of the times at these.
    """
    for a, b, high, low in zip(tokens, tokens[1:], ratios, ratios[1:], strict=False):
        if high > 1 >= low:
            return float(a * (b / a) ** (log2(high) / (log2(high) - log2(low))))
    return None


def cost_of(spec: LatentSpec, tokens: float, context: int) -> float:
    """The cost of a multiply-add of attention at which both forms cost the same with so many tokens."""
    product = spec.latent_width * (spec.nope_width + spec.value_width)
    widths = spec.row_width + spec.latent_width - spec.key_width - spec.value_width
    return product * (context - tokens) / (tokens * context * widths)


def measure(
    path: Path | None = None,
    contexts: Sequence[int] = CONTEXTS,
    threads: int | None = None,
    kv_dtype: str = "bf16",
    layer: tuple[LatentSpec, tuple[PackedWeight, PackedWeight]] | None = None,
) -> dict[str, Any]:
    """Milliseconds of both forms by context and tokens, where they cross, and the cost of attention that this means.

    path: a model whose first latent attention is measured; None: `layer`, default random weights.
    """
    library = need_library()
    spec, weights = (layer or random_layer()) if path is None else model_layer(path)
    before = library.threads()
    rows, crossings = [], []
    try:
        if threads is not None:
            library.set_threads(threads)
        used = library.threads()
        for context in contexts:
            layers = {form: Layer(spec, form, weights, kv_dtype, context) for form in FORMS}
            counts = [1 << k for k in range(min(MOST_TOKENS, context).bit_length())]
            times = {form: [layer.seconds(n) for n in counts] for form, layer in layers.items()}
            for n, expanded, absorbed in zip(counts, *times.values(), strict=True):
                chosen = FORMS[0] if expands(n, context, spec, ATTEND_COST) else FORMS[1]
                found = {"expanded ms": round(expanded * 1e3, 3), "absorbed ms": round(absorbed * 1e3, 3)}
                rows.append({"context": context, "tokens": n, **found, "chosen": chosen})
            ratios = [e / a for e, a in zip(*times.values(), strict=True)]
            at = crossing(counts, ratios)
            cost = None if at is None else round(cost_of(spec, at, context), 2)
            crossings.append({"context": context, "tokens": at and round(at, 1), "cost of attention": cost})
    finally:
        library.set_threads(before)
    settings = {"threads": used, "runs": _RUNS, "kv_dtype": kv_dtype, "weights": weights[0].layout}
    widths = {"heads": spec.num_heads, "latent": spec.latent_width, "nope": spec.nope_width}
    return {
        "bench": "mla",
        **origin(),
        "versions": {"plait": plait.__version__},
        "settings": settings | widths | {"rope": spec.rope_width, "value": spec.value_width},
        "cost in use": ATTEND_COST,
        "rows": rows,
        "crossings": crossings,
    }
