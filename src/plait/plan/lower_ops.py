"""What each operation of a recording becomes. No torch.

A function returns False, having emitted nothing, where there is no native form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from math import prod

import numpy as np

from plait.kernels.abi import (
    ACTIVATIONS,
    FLOAT_LAYOUTS,
    GATES,
    KIND_F32,
    KIND_Q8,
    LATENT_FORMS,
    LAYOUTS,
    MAX_EXPERTS,
    ROUTE_MASKED_ZERO,
    ROUTE_TWO_BEST,
    ROUTER_SCORES,
    ROWS_TOKENS,
    XIELU,
)
from plait.ops.recording import Op
from plait.ops.spec import LatentSpec, RouterSpec
from plait.plan.lowered import ALIGNMENT
from plait.plan.lowering import QUANTISED_BLOCK, Lowering
from plait.weights.latent import fits
from plait.weights.numbers import rounded


def _embed(low: Lowering, op: Op) -> bool:
    (ref,) = op.weights
    of, offset = low.step_arrays.get(op.inputs[0]), op.attrs.get("offset", 0)
    if ref is None or ref.rows is not None or low.weights[ref.name].layout not in LAYOUTS:
        return False
    if of not in ("ids", "positions") or (offset and of == "ids"):
        return False
    scale = op.attrs.get("scale", 1.0)
    if op.attrs.get("round_scale"):
        # The model was trained with the factor in its weights' dtype. A table of BF16 or F16 numbers tells that dtype;
        # one in fp32 needs no rounding, and of a quantised one nothing is known: there the factor stays as it is.
        scale = float(rounded(np.array([scale], np.float32), low.weights[ref.name].layout)[0])
    i = (int(of == "positions"), offset)
    low.emit("embed", op, (), (low.new(op.outputs[0]),), (low.matrix(ref),), i, f=(scale,))
    return True


def _positions(low: Lowering, op: Op) -> bool:
    if low.step_arrays.get(op.inputs[0]) != "positions":
        return False
    frequencies = tuple(op.attrs["inv_freq"])
    if frequencies not in low.table_starts:
        low.table_starts[frequencies] = len(low.frequencies)
        low.frequencies += frequencies
    i = (low.table_starts[frequencies], len(frequencies))
    low.emit("positions", op, (), (low.new(op.outputs[0]),), i=i, f=(op.attrs.get("magnitude", 1.0),))
    return True


def _linear(low: Lowering, op: Op) -> bool:
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


def _activated(low: Lowering, op: Op) -> bool:
    """gated_linear and activated_linear."""
    if not low.fits[id(op)]:
        return False
    inputs = (low.operand(op),)
    outputs = (low.new(op.outputs[0], quantised=low.only_as_records(op.outputs[0])),)
    w = tuple(low.matrix(ref) for ref in op.weights)
    kind = "gated" if op.name == "gated_linear" else "activated"
    low.emit(kind, op, inputs, outputs, w, (GATES[op.attrs["kind"]],), _numbers(op))
    return True


def _numbers(op: Op) -> tuple[float, ...]:
    """What an activation needs to be given."""
    return (op.attrs["alpha"], op.attrs["limit"]) if op.attrs["kind"] == "clamped_swiglu" else ()


def _logits(low: Lowering, op: Op) -> bool:
    """logits and capped_logits. Where more is done to the logits, they are a product like any other."""
    value = op.outputs[0]
    if not low.fits[id(op)]:
        return False
    bias = op.weights[1] if len(op.weights) > 1 else None
    inputs, w = (low.operand(op),), (low.matrix(op.weights[0]), low.matrix(bias))
    limit = op.attrs.get("limit", 0.0)
    if low.recording.outputs.get("logits") == value and value not in low.readers:
        low.emit("logits", op, inputs, (), w, f=(limit,))
        return True
    product = low.new(value)
    low.emit("linear", op, inputs, (product,), w, (1,))
    if limit:
        low.emit("soft_cap", op, (product,), (low.new(value),), f=(limit,))
    return True


def _rms_norm(low: Lowering, op: Op) -> bool:
    """rms_norm and head_norm; fp32_weight means nothing in fp32."""
    (ref,) = op.weights
    heads, width = low.heads(op.inputs[0])
    if not low.floats(op.inputs[0]) or not low.is_vector(ref, width):
        return False
    i = (heads, width, int(bool(op.attrs.get("unit_offset"))))
    _row(low, op, "rms_norm", (low.matrix(ref),), i, (op.attrs["eps"],))
    return True


def _layer_norm(low: Lowering, op: Op) -> bool:
    heads, width = low.heads(op.inputs[0])
    own = any(ref is not None and len(ref.shape) > 1 for ref in op.weights)  # every head has weights of its own
    size = heads * width if own else width
    if not low.floats(op.inputs[0]) or not all(low.is_vector(ref, size) for ref in op.weights):
        return False
    matrices, i, f = tuple(low.matrix(ref) for ref in op.weights), (heads, width, 0, int(own)), (op.attrs["eps"],)
    if not op.attrs.get("unit_offset") or op.weights[0] is None:
        _row(low, op, "layer_norm", matrices, i, f)
        return True
    # n * (1 + w) + b is (n * w + b) + n.
    x, (rows, wide) = low.of(op.inputs[0]), (low.rows(op.inputs[0]), heads * width)
    parts = low.buffer(rows, KIND_F32, wide), low.buffer(rows, KIND_F32, wide)
    low.emit("layer_norm", op, (x,), parts[:1], matrices, i, f)
    low.emit("layer_norm", op, (x,), parts[1:], (-1, -1), (heads, width), f)
    low.emit("add", op, parts, (low.new(op.outputs[0]),))
    return True


def _rotate(low: Lowering, op: Op) -> bool:
    x, angles = op.inputs
    heads, width = low.heads(x)
    turning, pairing, start = op.attrs["width"], op.attrs.get("pairing", "halves"), op.attrs.get("start", 0)
    pairs = prod(low.tail(angles)) // 2
    if not low.floats(x, angles) or turning % 2 or 2 * pairs != turning or pairing not in ("halves", "adjacent"):
        return False
    _row(low, op, "rotate", (), (heads, width, turning, int(pairing == "adjacent"), start))
    return True


def _attend(low: Lowering, op: Op) -> bool:
    spec, layer = op.attrs["spec"], op.attrs["layer"]
    sinks = op.weights[0] if op.weights else None
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
        or not low.is_vector(sinks, spec["num_heads"])
    ):
        return False
    number = low.cache_numbers.setdefault(layer, len(low.cache_numbers))
    q, k, v = (low.of(value) for value in op.inputs)
    low.emit("write_kv", op, (k, v), (), i=(number,))
    # A row of records is made when its heads are done; in the item itself only where a head fills whole blocks.
    records = spec["value_width"] % QUANTISED_BLOCK == 0 and low.only_as_records(op.outputs[0])
    out = low.new(op.outputs[0], quantised=records)
    f = (spec["scale"], spec["soft_cap"])
    low.emit("attend", op, (q,), (out,), (low.matrix(sinks),), (number, spec["num_heads"], spec["window"]), f)
    return True


# What a multiply-add of attention costs relative to one in a product, in the native kernels. A number of few bits: its
# products are exact, so that the kernels and plait.ops.latent.expands decide the same.
ATTEND_COST = 1.5


def _attend_latent(low: Lowering, op: Op) -> bool:
    spec, layer = LatentSpec(**op.attrs["spec"]), op.attrs["layer"]
    (ref,) = op.weights
    group = low.layout.groups[low.layout.slot(layer)[0]]
    cache = group.cache
    # No windows, whole panels, and blocks of whole vectors.
    if (
        ref is None
        or ref.rows is not None
        or low.weights[ref.name].layout not in LAYOUTS
        or not low.floats(*op.inputs)
        or not fits(spec)
        or (cache.num_kv_heads, cache.key_width, cache.value_width, cache.window) != (1, spec.row_width, 0, 0)
        or group.block_tokens % 8
    ):
        return False
    number = low.cache_numbers.setdefault(layer, len(low.cache_numbers))
    low.out.latents[layer] = spec.latent_width
    q, latent, k_rope = (low.of(value) for value in op.inputs)
    low.emit("write_kv", op, (latent, k_rope), (), i=(number,))
    i = (number, spec.num_heads, spec.nope_width, spec.value_width, LATENT_FORMS[spec.form])
    w, f = (low.matrix(ref), low.second(ref)), (spec.scale, ATTEND_COST)
    low.emit("attend_latent", op, (q,), (low.new(op.outputs[0]),), w, i, f)
    return True


_ATTEND_KEYS = {"num_heads", "num_kv_heads", "key_width", "value_width", "scale", "window", "soft_cap"}


def _gate(low: Lowering, op: Op) -> bool:
    x, y = op.inputs
    if op.attrs["kind"] not in GATES or not low.floats(x, y):
        return False
    one = low.tail(x) == (1,) and low.shape(x)[0] == low.shape(y)[0] and op.attrs["kind"] in ACTIVATIONS
    if not one and not _alike(low, op):
        return False
    _row(low, op, "gate", (), (GATES[op.attrs["kind"]], int(one)), _numbers(op))
    return True


def _activate(low: Lowering, op: Op) -> bool:
    if op.attrs["kind"] not in ACTIVATIONS or not low.floats(*op.inputs):
        return False
    _row(low, op, "activate", (), (ACTIVATIONS[op.attrs["kind"]],))
    return True


def _xielu(low: Lowering, op: Op) -> bool:
    """An activation that reads its four numbers where they lie."""
    if not low.floats(*op.inputs) or not all(low.is_vector(ref, 1) for ref in op.weights):
        return False
    _row(low, op, "activate", tuple(low.matrix(ref) for ref in op.weights), (XIELU,))
    return True


def _add(low: Lowering, op: Op) -> bool:
    if not _alike(low, op):
        return False
    _row(low, op, "add")
    return True


def _route(low: Lowering, op: Op) -> bool:
    """A product with the router, whose numbers are floats, and the choice by its results."""
    (x,) = op.inputs
    router, bias, selection_bias = op.weights
    spec = op.attrs["spec"]
    if (
        router is None
        or not low.floats(x)
        or low.weights[router.name].layout not in FLOAT_LAYOUTS
        or not all(low.is_vector(ref, spec["num_experts"]) for ref in (bias, selection_bias))
        or spec["num_experts"] > MAX_EXPERTS
        or set(spec) != _ROUTER_KEYS
        or spec["scores"] not in ROUTER_SCORES
    ):
        return False
    ids, weights, logits = (low.new(value) for value in op.outputs)
    low.emit("linear", op, (low.of(x),), (logits,), (low.matrix(router), low.matrix(bias)), (1,))
    flags = ROUTE_TWO_BEST * (spec["group_score"] == "two_best") + ROUTE_MASKED_ZERO * (spec["masked"] == "zero")
    i = (
        spec["num_experts"],
        spec["top_k"],
        ROUTER_SCORES[spec["scores"]],
        int(RouterSpec(**spec).renormalises),
        spec["groups"],
        spec["top_groups"],
        flags,
    )
    f = (spec["scale"], spec["jitter"], spec["least_sum"])
    low.emit("route", op, (logits,), (ids, weights), (low.matrix(selection_bias),), i, f)
    return True


_ROUTER_KEYS = {field.name for field in fields(RouterSpec)}


def _experts(low: Lowering, op: Op) -> bool:
    x, ids, weights = op.inputs
    gate_up, up_bias, down, down_bias = op.weights
    gated = op.attrs.get("gated", True)
    known = GATES if gated else ACTIVATIONS
    if gate_up is None or down is None or set(op.attrs) - _EXPERTS_KEYS or op.attrs["kind"] not in known:
        return False
    packed = [low.weights[ref.name] for ref in (gate_up, down)]
    (experts, _, width), hidden = gate_up.shape, down.shape[2]
    if (
        not low.floats(x, weights)
        or any(weight.layout not in LAYOUTS for weight in packed)
        or [weight.parts for weight in packed] != [2 if gated else 1, 1]
        or not (low.is_vector(up_bias) and low.is_vector(down_bias))
        or experts > MAX_EXPERTS
    ):
        return False
    quantised = [weight.layout not in FLOAT_LAYOUTS for weight in packed]
    given = low.record(x, op) if quantised[0] else low.of(x)
    out, (top_k,) = low.new(op.outputs[0]), low.tail(ids)
    rows = low.rows(op.outputs[0])
    inner = low.slots(rows, KIND_Q8 if quantised[1] else KIND_F32, top_k, hidden)
    # Rows that the experts share out are gathered where their results will be.
    results = low.slots(rows, KIND_F32, top_k, width, low.out.buffers[given].row_bytes)
    w = tuple(low.matrix(ref) for ref in op.weights)
    i = (GATES[op.attrs["kind"]], experts, int(gated))
    low.emit("experts", op, (given, low.of(ids), low.of(weights)), (out, inner, results), w, i, _numbers(op))
    return True


_EXPERTS_KEYS = {"kind", "gated", "alpha", "limit"}


def _constant(kind: str, attribute: str) -> Callable[[Lowering, Op], bool]:
    """scale, soft_cap and clip: a row with one number."""

    def function(low: Lowering, op: Op) -> bool:
        if not low.floats(*op.inputs):
            return False
        _row(low, op, kind, f=(op.attrs[attribute],))
        return True

    return function


def _select_rows(low: Lowering, op: Op) -> bool:
    x, rows = op.inputs
    if not low.floats(x) or low.rows(x) != ROWS_TOKENS or low.step_arrays.get(rows) != "logit_rows":
        return False
    low.emit("select_rows", op, (low.of(x),), (low.new(op.outputs[0]),))
    return True


def _split(low: Lowering, op: Op) -> bool:
    """Parts of a row that begin at aligned columns lie where they are."""
    if not low.floats(op.inputs[0]) or len(low.tail(op.inputs[0])) != 1:
        return False
    starts = np.cumsum([0, *op.attrs["sizes"][:-1]]) * 4
    if any(int(start) % ALIGNMENT for start in starts):
        return False
    source = low.of(op.inputs[0])
    low.sliced.add(low.out.buffers[source].memory)
    for value, start in zip(op.outputs, starts, strict=True):
        low.new(value, memory=source, column=low.out.buffers[source].column + int(start))
    return True


def _nothing(low: Lowering, op: Op) -> bool:
    """view, dropout and cast, where they leave the numbers as they are."""
    return op.attrs.get("dtype", "f32") == "f32"


def _alike(low: Lowering, op: Op) -> bool:
    """Whether all operands are floats of one shape: kernels do not broadcast."""
    return low.floats(*op.inputs) and len({low.shape(value) for value in op.inputs}) == 1


def _row(
    low: Lowering,
    op: Op,
    kind: str,
    w: tuple[int, ...] = (),
    i: tuple[int, ...] = (),
    f: tuple[float, ...] = (),
) -> None:
    """A row operation: its operands' buffers in, a new buffer out."""
    inputs = tuple(low.of(value) for value in op.inputs)
    low.emit(kind, op, inputs, (low.new(op.outputs[0]),), w, i, f)


NATIVE: dict[str, Callable[[Lowering, Op], bool]] = {
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
    "attend_latent": _attend_latent,
    "gate": _gate,
    "activate": _activate,
    "xielu": _xielu,
    "dropout": _nothing,
    "cast": _nothing,
    "view": _nothing,
    "split": _split,
    "route": _route,
    "experts": _experts,
    "add": _add,
    "scale": _constant("scale", "factor"),
    "soft_cap": _constant("soft_cap", "limit"),
    "clip": _constant("clip", "limit"),
    "select_rows": _select_rows,
    "logits": _logits,
    "capped_logits": _logits,
}
