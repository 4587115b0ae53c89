"""What a recording is lowered to, run by a numpy model of the runtime, against the reference of the recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from plait.errors import RecordingError, WeightError
from plait.kernels.abi import FLOAT_LAYOUTS, KIND_F32, KIND_Q8
from plait.memory.layout import make_layout
from plait.memory.paged import PagedMemory
from plait.model.decoder import Decoder
from plait.model.record import record
from plait.ops.interpreter import Interpreter
from plait.ops.recording import Recording, Value, WeightRef
from plait.ops.symbolic import Recorder
from plait.plan.fusion import fuse
from plait.plan.lower import lower
from plait.plan.lowered import Lowered
from tests.configs import CONFIGS
from tests.plan.models import (
    ALL,
    PlainWeight,
    every_attribute,
    layout_of,
    layouts_of,
    make,
    plain_store,
    slow_but,
    without_kernel,
)
from tests.plan.plan_model import PlanModel
from tests.plan.steps import MIXED, Script
from tests.threads import one_thread

__all__ = ["one_thread"]

pytestmark = pytest.mark.usefixtures("one_thread")

# Widths that quantised layouts can have: the block of 32 divides all of them. Heads of some families are hidden / heads
# wide and nothing else; families with keys of their own (gptj, opt) are left out.
_SQUARE = ("gpt_neox", "cohere2", "helium", "stablelm")
_EXPERT_WIDTHS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
WIDE = {
    family: {**raw, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    | {key: width for key, width in _EXPERT_WIDTHS.items() if key in raw}
    for family, raw in CONFIGS.items()
    if family not in _SQUARE and "intermediate_size" in raw
} | {family: {**CONFIGS[family], "hidden_size": 128, "intermediate_size": 96} for family in _SQUARE}
for raw in WIDE.values():
    if "kv_lora_rank" in raw:  # whole panels too
        del raw["head_dim"]
        widths = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        raw |= widths | ({"q_lora_rank": 32} if raw["q_lora_rank"] else {})
# Twice as wide as the others, it would spend all of the tolerance on fp32's rounding with their weights.
WIDE["helium"] |= {"head_dim": 32, "initializer_range": 0.1}
# Its experts' factor of up + 1 is large: one rounding of an activation that goes the other way moves the logits more.
WIDE["gpt_oss"] |= {"initializer_range": 0.2}


@cache
def decoder_of(name: str, wide: bool = False) -> Decoder:
    return make((WIDE if wide else ALL)[name])


def lowered(decoder: Decoder, layout: str | Callable[[str], str] = "F32", fused: bool = True, **sizes) -> Lowered:
    store = plain_store(decoder, layout)
    recording = record(decoder)
    if fused:
        recording = fuse(recording, lambda ref: store[ref.name].layout not in FLOAT_LAYOUTS)
    return lower(recording, store, layout_of(decoder), **{"max_tokens": 320, "max_rows": 320} | sizes)


def reference(decoder: Decoder, steps: list, num_blocks: int) -> list[dict[str, torch.Tensor]]:
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    return replay(record(decoder), weights, layout_of(decoder), steps, num_blocks)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def check(decoder: Decoder, plan: Lowered, store, tolerance: float, parts=MIXED) -> None:
    script = Script(layout_of(decoder), decoder.config.vocab_size)
    steps = [script.step(p, rows=None if i % 2 else [sum(n for _, n in p) - 1]) for i, p in enumerate(parts)]
    model = PlanModel(plan, store, layout_of(decoder), script.num_blocks)
    for (ids, inputs), expected in zip(steps, reference(decoder, steps, script.num_blocks), strict=True):
        logits, hidden = model.step(ids, inputs)
        assert logits.shape == tuple(expected["logits"].shape)
        scale = max(1.0, float(expected["logits"].abs().max()) / 10)
        assert np.abs(log_softmax(logits) - log_softmax(expected["logits"].numpy())).max() <= tolerance * scale
        assert np.abs(hidden - expected["hidden"].numpy()).max() <= tolerance * 10


SHORT = (((0, 1),), ((1, 7),), ((0, 1), (1, 2), (2, 33)), ((2, 1), (0, 1)))


@pytest.mark.parametrize("name", slow_but(("llama", "gpt_neox"), sorted(CONFIGS)))
def test_a_plan_computes_what_was_recorded(name: str) -> None:
    decoder = decoder_of(name)
    plan = lowered(decoder)
    assert set(plan.host_ops) == without_kernel(decoder.config)
    if not plan.host_ops:
        check(decoder, plan, plain_store(decoder), 1e-4, SHORT)


# Executors lower fused recordings only: as recorded, one configuration per family is enough.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fused"), [(name, True) for name in sorted(ALL)] + [(name, False) for name in sorted(CONFIGS)]
)
def test_every_configuration_in_mixed_steps(name: str, fused: bool) -> None:
    decoder = decoder_of(name)
    plan = lowered(decoder, fused=fused)
    if not fused and decoder.config.logit_soft_cap:
        assert plan.host_ops == ("store_logits",)  # only a fused recording caps logits where they are made
        return
    assert set(plan.host_ops) == without_kernel(decoder.config)
    if not plan.host_ops:
        check(decoder, plan, plain_store(decoder), 1e-4)


@pytest.mark.parametrize(
    ("form", "factor"), [("F32", 48**0.5), ("BF16", 6.9375), ("F16", 6.9296875), ("Q8_0", 48**0.5)]
)
def test_a_factor_is_rounded_as_the_table_is_stored(form: str, factor: float) -> None:
    recorder = Recorder({})
    ids = recorder.input("ids", Value(("N",), "i64"))
    table = WeightRef("table", (64, 48), "float32")
    x = recorder.emit("embed", (ids,), (table,), scale=48**0.5, round_scale=True)
    recording = recorder.recording({"hidden": x}, (), {"vocab_size": 64, "hidden_size": 48})
    store = {"table": PlainWeight("table", np.zeros((64, 48), np.float32), form)}
    low = lower(recording, store, layout_of(decoder_of("llama")), 8, 8)
    (op,) = (op for op in low.ops if op.kind == "embed")
    assert op.f[0] == pytest.approx(factor, rel=1e-7)


def replay(recording: Recording, weights: dict[str, torch.Tensor], layout, steps: list, num_blocks: int) -> list:
    """What the reference operations give, one dictionary of outputs per step."""
    interpreter = Interpreter(recording, weights)
    memory = PagedMemory(layout, num_blocks)
    results = []
    with torch.inference_mode():
        for ids, inputs in steps:
            tensor = torch.from_numpy(ids).long()
            begun = memory.begin(tensor, inputs)
            rows = torch.from_numpy(inputs.logit_rows).long()
            values = {"ids": tensor, "positions": begun.positions, "logit_rows": rows}
            results.append(interpreter.run(values, begun))
    return results


@pytest.mark.parametrize("fused", [True, False])
def test_every_attribute_reaches_its_operation(fused: bool) -> None:
    recording, weights = every_attribute()
    layout = make_layout(recording.caches, context_tokens=384, chunk_tokens=384)
    forms = layouts_of(weights, "F32")
    store = {n: PlainWeight(n, w.numpy(), forms[n]) for n, w in weights.items()}
    plan = lower(fuse(recording) if fused else recording, store, layout, 64, 64)
    assert plan.host_ops == (() if fused else ("store_logits",))
    if not fused:
        # What the host would do to the logits is nothing to this model: it reads them where they lie.
        (at,) = plan.host
        store_logits = plan.ops.pop(at)
    script = Script(layout, 50)
    steps = [script.step(parts) for parts in SHORT]
    model = PlanModel(plan, store, layout, script.num_blocks)
    for (ids, inputs), expected in zip(
        steps, replay(recording, weights, layout, steps, script.num_blocks), strict=True
    ):
        logits, hidden = model.step(ids, inputs)
        if not fused:
            logits = model.read(store_logits.inputs[0], np.arange(len(ids)))
        assert np.abs(logits - expected["logits"].numpy()).max() <= 1e-4
        assert np.abs(hidden - expected["hidden"].numpy()).max() <= 1e-4


def mixed_layouts(name: str) -> str:
    """As in a file that keeps some matrices in full: v and the down projections, the embedding."""
    return "F32" if any(part in name for part in ("v_proj", "down_proj", "embed")) else "Q8_0"


@pytest.mark.parametrize("layout", ["Q8_0", mixed_layouts], ids=["all", "mixed"])
@pytest.mark.parametrize("name", slow_but(("llama",), sorted(WIDE)))
def test_quantised_matrices_read_quantised_activations(name: str, layout: str | Callable[[str], str]) -> None:
    """The model checks that every quantised matrix is given records and every float one floats."""
    decoder = decoder_of(name, wide=True)
    plan = lowered(decoder, layout)
    assert set(plan.host_ops) == without_kernel(decoder.config)
    if plan.host_ops:
        return
    check(decoder, plan, plain_store(decoder, layout), 1e-4, SHORT)


def kinds(plan: Lowered) -> Counter[str]:
    return Counter(op.kind for op in plan.ops)


def test_one_quantisation_per_input_and_none_where_the_operation_before_gives_records() -> None:
    decoder = decoder_of("llama", wide=True)
    layers = len(decoder.model.layers)
    plan = lowered(decoder, "Q8_0")
    # Two norms per layer, and the rows that the head reads; attention and the gate give records themselves.
    assert kinds(plan)["quantise"] == 2 * layers + 1
    for op in plan.ops:
        if op.kind in ("gated", "attend"):
            assert plan.buffers[op.outputs[0]].kind == KIND_Q8
    counts = kinds(lowered(decoder, "F32"))
    assert counts["quantise"] == 0
    (last,) = (op for op in plan.ops if op.kind == "logits")
    (made,) = (op for op in plan.ops if op.outputs == last.inputs)
    assert made.kind == "quantise" and plan.rows_of(made) == 1


def test_heads_that_do_not_fill_whole_blocks_are_quantised_afterwards() -> None:
    decoder = make({**CONFIGS["llama"], "hidden_size": 64, "head_dim": 16, "intermediate_size": 96})
    plan = lowered(decoder, "Q8_0")
    assert all(plan.buffers[op.outputs[0]].kind == KIND_F32 for op in plan.ops if op.kind == "attend")
    assert kinds(plan)["quantise"] == 3 * len(decoder.model.layers) + 1


def test_a_value_that_floats_are_needed_of_too_keeps_them() -> None:
    """down_proj is a float matrix here: the gate must not give records."""
    decoder = decoder_of("llama", wide=True)
    plan = lowered(decoder, mixed_layouts)
    assert all(plan.buffers[op.outputs[0]].kind == KIND_F32 for op in plan.ops if op.kind == "gated")
    assert all(plan.buffers[op.outputs[0]].kind == KIND_Q8 for op in plan.ops if op.kind == "attend")


def test_hidden_states_stay_numbers_even_where_only_quantised_products_read_them() -> None:
    store = weight("table", 10, 32) | weight("w", 32, 32, layout="Q8_0")
    for kept, kind in ((False, KIND_Q8), (True, KIND_F32)):
        r = Recorder({})
        y = r.emit("activate", (r.emit("linear", (embedded(r),), (WeightRef("w", (32, 32)), None)),), kind="silu")
        r.emit("linear", (y,), (WeightRef("w", (32, 32)), None))
        recording = fuse(r.recording({"hidden": y} if kept else {}), lambda ref: True)
        plan = lower(recording, store, layout_of(decoder_of("llama")), 8, 8)
        (op,) = (op for op in plan.ops if op.kind == "activated")
        assert plan.buffers[op.outputs[0]].kind == kind


def test_sums_are_written_over_their_residual() -> None:
    plan = lowered(decoder_of("llama"))
    sums = [op for op in plan.ops if op.kind == "linear" and len(op.inputs) == 2]
    assert len(sums) == 6
    for op in sums:
        assert plan.buffers[op.inputs[1]].offset == plan.buffers[op.outputs[0]].offset


def test_a_residual_that_is_read_again_is_not_written_over() -> None:
    weights = weight("table", 10, 32) | weight("w", 32, 32)
    product = (WeightRef("w", (32, 32)), None)

    def build(r: Recorder, again: bool) -> None:
        x = embedded(r)
        y = r.emit("scale", (x,), factor=2.0)
        z = r.emit("add", (x, r.emit("linear", (y,), product)))
        r.emit("add", (z, x if again else y))

    for again in (False, True):
        recorder = Recorder({})
        build(recorder, again)
        plan = lower(fuse(recorder.recording({})), weights, layout_of(decoder_of("llama")), 8, 8)
        (op,) = (op for op in plan.ops if op.kind == "linear")
        over = plan.buffers[op.inputs[1]].offset == plan.buffers[op.outputs[0]].offset
        assert over != again
    # What a product itself reads must not change under it.
    recorder = Recorder({})
    x = embedded(recorder)
    recorder.emit("add", (x, recorder.emit("linear", (x,), product)))
    plan = lower(fuse(recorder.recording({})), weights, layout_of(decoder_of("llama")), 8, 8)
    (op,) = (op for op in plan.ops if op.kind == "linear")
    assert plan.buffers[op.inputs[0]].offset != plan.buffers[op.outputs[0]].offset


def test_memory_does_not_grow_with_the_number_of_layers() -> None:
    few, many = (lowered(make({**CONFIGS["llama"], "num_hidden_layers": n})) for n in (3, 9))
    assert many.arena_bytes == few.arena_bytes
    total = sum(b.row_bytes * 320 for b in many.buffers)
    assert many.arena_bytes < total / 6


def test_buffers_lie_inside_the_arena_at_aligned_offsets() -> None:
    plan = lowered(decoder_of("gemma3_text"), max_tokens=33, max_rows=5)
    for b in plan.buffers:
        assert b.offset % 64 == 0 and b.row_bytes % 64 == 0
        assert b.offset + b.row_bytes * (33 if b.rows == 0 else 5) <= plan.arena_bytes


def test_the_model_sees_memory_that_is_reused_too_early() -> None:
    """The tests above would fail: a row operation's result over a value that its stage still needs."""
    decoder = decoder_of("llama")
    plan = lowered(decoder)
    first = next(i for i, op in enumerate(plan.ops) if op.kind == "linear")
    q, k = plan.ops[first].outputs[:2]
    plan.buffers[q].offset = plan.buffers[k].offset
    with pytest.raises(AssertionError):
        check(decoder, plan, plain_store(decoder), 1e-4, SHORT)


# Forms that have no kernel.


def host_names(name: str, change: Callable[[Recording], Recording] | None = None, **raw) -> tuple[str, ...]:
    decoder = make({**CONFIGS[name], **raw})
    recording = fuse(record(decoder))
    recording = change(recording) if change else recording
    return lower(recording, plain_store(decoder), layout_of(decoder), 32, 32).host_ops


def test_odd_head_widths_attend_on_the_host() -> None:
    assert host_names("llama", head_dim=6, num_key_value_heads=2) == ()
    recorder, layer = Recorder({}), {"layer": 0}
    decoder = decoder_of("llama")
    spec = {"num_heads": 4, "num_kv_heads": 2, "key_width": 6, "value_width": 6, "scale": 1.0, "window": 0}
    for change, expected in (({}, ()), ({"key_width": 5}, ("attend",)), ({"sinks": True}, ("attend",))):
        given = {**spec, "soft_cap": 0.0, **change}
        recorder = Recorder({})
        q, k, v = (recorder.input(n, Value(("N", h, given["key_width"]))) for n, h in (("q", 4), ("k", 2), ("v", 2)))
        y, x, z = (recorder.emit("scale", (s,), factor=1.0) for s in (q, k, v))
        recorder.emit("attend", (y, x, z), spec=given, **layer)
        recording = recorder.recording({})
        assert lower(recording, {}, layout_of(decoder), 8, 8).host_ops == ("scale", *expected)


def simple(build: Callable[[Recorder], object], store: dict[str, PlainWeight] | None = None) -> Lowered:
    recorder = Recorder({})
    recorder.inputs = {}
    build(recorder)
    return lower(recorder.recording({}), store or {}, layout_of(decoder_of("llama")), 8, 8)


def embedded(recorder: Recorder, width: int = 32):
    ids = recorder.input("ids", Value(("N",), "i64"))
    return recorder.emit("embed", (ids,), (WeightRef("table", (10, width)),), scale=1.0)


def weight(name: str, *shape: int, layout: str = "F32") -> dict[str, PlainWeight]:
    return {name: PlainWeight(name, np.zeros(shape, np.float32), layout)}


def test_an_unknown_activation_and_a_weight_that_is_not_packed_run_on_the_host() -> None:
    table = weight("table", 10, 32)
    plan = simple(lambda r: r.emit("activate", (embedded(r),), kind="mish"), table)
    assert plan.host_ops == ("activate",)
    for layout, expected in (("Q8_0", ()), ("VECTOR", ("linear",)), ("IQ4_XS", ("linear",))):
        store = table | weight("w", 4, 32, layout=layout)
        plan = simple(lambda r: r.emit("linear", (embedded(r),), (WeightRef("w", (4, 32)), None)), store)
        assert plan.host_ops == expected
    plan = simple(embedded, weight("table", 10, 32, layout="IQ4_XS"))
    assert plan.host_ops == ("embed",)


def test_slices_of_a_weight_begin_at_a_panel() -> None:
    store = weight("table", 10, 32) | weight("w", 64, 32)
    for rows, expected in (((16, 40), ()), ((8, 24), ("linear",))):
        ref = WeightRef("w", (64, 32), rows=rows)
        plan = simple(lambda r, ref=ref: r.emit("linear", (embedded(r),), (ref, None)), store)
        assert plan.host_ops == expected


def test_a_split_is_a_slice_of_the_row_where_it_is_aligned() -> None:
    table = weight("table", 10, 48)

    def parts(*sizes: int):
        def build(r: Recorder) -> None:
            for part in r.emit("split", (embedded(r, 48),), sizes=sizes):
                r.emit("scale", (part,), factor=2.0)

        return build

    plan = simple(parts(16, 32), table)
    assert plan.host_ops == () and kinds(plan) == {"embed": 1, "scale": 2}
    whole, first, second = plan.buffers[0], *(plan.buffers[op.inputs[0]] for op in plan.ops[1:])
    assert (first.offset, second.offset) == (whole.offset, whole.offset + 64)
    assert first.row_bytes == second.row_bytes == whole.row_bytes
    assert simple(parts(8, 40), table).host_ops == ("split",)


def test_a_missing_weight_or_another_shape_is_named() -> None:
    with pytest.raises(WeightError, match="table"):
        simple(embedded)
    with pytest.raises(WeightError, match=r"table.*\(10, 48\)"):
        simple(embedded, weight("table", 10, 48))


def test_a_value_without_token_rows_is_refused() -> None:
    with pytest.raises(RecordingError, match="'S'"):
        simple(lambda r: r.emit("scale", (r.input("ids", Value(("S", 4))),), factor=1.0))
