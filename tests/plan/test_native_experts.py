"""Mixtures of experts on the native plan: attributes, the rows they run over, steps in a row, threads, fallbacks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from plait.kernels.abi import KIND_F32, KIND_I32, KIND_Q8, ROWS_LOGITS, ROWS_TOKENS
from plait.kernels.native import native_library, reason
from plait.memory.layout import make_layout
from plait.model.record import record
from plait.ops.recording import Recording
from plait.plan.executor import NativeExecutor
from plait.plan.fusion import fuse
from plait.plan.lower import lower
from tests.configs import CONFIGS
from tests.plan.mixtures import ROUTERS, VOCABULARY, changed, mixtures
from tests.plan.models import PlainWeight, layout_of, layouts_of, make, packed, quantised_store
from tests.plan.plan_model import PlanModel
from tests.plan.steps import MIXED, Script
from tests.plan.test_lower import SHORT, WIDE, replay
from tests.plan.test_native_executor import Pair
from tests.plan.test_native_steps import Decoding
from tests.threads import one_thread

__all__ = ["one_thread"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}"),
]
FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "phimoe"]
every_family = pytest.mark.parametrize("family", FAMILIES)


class Made:
    """The recording of tests.plan.mixtures, or a change of it, on the native plan."""

    def __init__(self, recording: Recording | None = None, form: str | Callable[[str], str] = "F32") -> None:
        own, self.weights = mixtures()
        self.recording = recording or own
        self.layout = make_layout(own.caches, context_tokens=384, chunk_tokens=384)
        self.store = packed(self.weights, form)
        self.script = Script(self.layout, VOCABULARY)
        blocks = self.script.num_blocks
        self.native = NativeExecutor(self.recording, self.store, self.layout, blocks, 400, kv_dtype="fp32")

    def agrees_with(self, recording: Recording, parts=SHORT, tolerance: float = 1e-4) -> None:
        steps = [self.script.step(p, None if i % 2 else [sum(n for _, n in p) - 1]) for i, p in enumerate(parts)]
        for step, expected in zip(
            steps, replay(recording, self.weights, self.layout, steps, self.script.num_blocks), strict=True
        ):
            assert np.abs(self.native.execute(*step).logits - expected["logits"].numpy()).max() <= tolerance
            given = self.native.execute(*step, hidden=True)
            assert np.abs(given.logits - expected["logits"].numpy()).max() <= tolerance
            assert np.abs(given.hidden - expected["hidden"].numpy()).max() <= tolerance


def test_every_attribute_of_routing_and_experts_reaches_the_kernels() -> None:
    made = Made()
    assert made.native.host_ops == ()
    made.agrees_with(made.recording, MIXED)


@pytest.mark.parametrize("fused", [True, False])
def test_the_plan_means_the_recording_wherever_its_memory_lies(fused: bool) -> None:
    """By the model of the runtime, which begins with garbage in all memory, and leaves it in what experts work in."""
    recording, weights = mixtures()
    layout = make_layout(recording.caches, context_tokens=384, chunk_tokens=384)
    forms = layouts_of(weights, "F32")
    parts = {
        name: 2 if w.shape[1] == 64 and name.endswith("up_proj") else 1 for name, w in weights.items() if w.ndim > 1
    }
    store = {n: PlainWeight(n, w.numpy(), forms[n], parts.get(n, 1)) for n, w in weights.items()}
    plan = lower(fuse(recording) if fused else recording, store, layout, 64, 64)
    assert plan.host_ops == ()
    script = Script(layout, VOCABULARY)
    steps = [script.step(parts) for parts in SHORT]
    model = PlanModel(plan, store, layout, script.num_blocks)
    for (ids, inputs), expected in zip(
        steps, replay(recording, weights, layout, steps, script.num_blocks), strict=True
    ):
        logits, hidden = model.step(ids, inputs)
        assert np.abs(logits - expected["logits"].numpy()).max() <= 1e-4
        assert np.abs(hidden - expected["hidden"].numpy()).max() <= 1e-4


def test_experts_after_the_last_attention_run_over_the_rows_with_logits() -> None:
    plan = Made().native.lowered
    rows = [plan.rows_of(op) for op in plan.ops if op.kind == "experts"]
    assert rows == [ROWS_TOKENS] * 4 + [ROWS_LOGITS]
    assert [plan.rows_of(op) for op in plan.ops if op.kind == "route"] == rows
    whole = lower(fuse(mixtures()[0]), Made().store, Made().layout, 64, 64)
    assert {whole.rows_of(op) for op in whole.ops if op.kind == "experts"} == {ROWS_TOKENS}


def test_buffers_of_experts_have_a_slot_for_every_choice() -> None:
    plan = Made(form=lambda name: "Q8_0" if "proj" in name else "F32").native.lowered
    for op, spec in zip((op for op in plan.ops if op.kind == "experts"), ROUTERS, strict=True):
        given, ids, shares = (plan.buffers[b] for b in op.inputs)
        out, inner, results = (plan.buffers[b] for b in op.outputs)
        assert [b.kind for b in (given, ids, shares)] == [KIND_Q8, KIND_I32, KIND_F32]
        assert [b.kind for b in (out, inner, results)] == [KIND_F32, KIND_Q8, KIND_F32]
        assert ids.width == shares.width == spec.top_k
        assert (inner.width, results.width) == (spec.top_k * 32, spec.top_k * 64)
        assert results.row_bytes >= spec.top_k * given.row_bytes and not results.row_bytes % (64 * spec.top_k)


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", lambda name: "Q4_1" if "up_proj" in name else "F32"])
@every_family
def test_quantised_experts_as_the_arithmetic_of_the_plan_says(family: str, form: str | Callable[[str], str]) -> None:
    """See test_native_executor: where a number lies between two roundings, the two may take different ones."""
    only = {"num_hidden_layers": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}
    decoder = make({**WIDE[family], **{key: value for key, value in only.items() if key in WIDE[family]}})
    store = quantised_store(decoder, form)
    layout = layout_of(decoder)
    script = Script(layout, decoder.config.vocab_size)
    native = NativeExecutor(record(decoder), store, layout, script.num_blocks, 64, kv_dtype="fp32")
    assert native.host_ops == () and "experts" in {op.kind for op in native.lowered.ops}
    model = PlanModel(native.lowered, store, layout, script.num_blocks, rounds=True)
    steps = [script.step(parts) for parts in SHORT]
    far = np.concatenate([np.abs(native.execute(*s).logits - model.step(*s)[0]).max(-1) for s in steps])
    assert np.mean(far < 1e-4) >= 0.8 and far.max() < 0.05


@every_family
def test_steps_in_a_row_are_those_one_by_one(family: str) -> None:
    decoding = Decoding(family)
    ids, values = decoding.one_by_one(20)
    got_ids, got_values = decoding.call()
    assert np.array_equal(got_ids, ids) and np.array_equal(got_values, values)


@pytest.mark.parametrize("form", ["F32", "Q8_0"])
def test_the_same_bits_with_any_number_of_threads_and_whatever_runs_beside(form: str) -> None:
    library = native_library()
    assert library is not None
    found = []
    try:
        for threads in (1, 2, 3):
            library.set_threads(threads)
            together, alone = Made(form=form), Made(form=form)
            both = together.native.execute(*together.script.step([(1, 40), (0, 90)])).logits.copy()
            chunks = [alone.native.execute(*alone.script.step([(0, n)])).logits.copy() for n in (1, 50, 2, 37)]
            assert np.array_equal(np.concatenate(chunks), both[40:])
            found.append(both)
    finally:
        library.set_threads(0)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_what_the_kernels_do_not_have_runs_through_the_reference() -> None:
    """Routers that are quantised, and experts of another function: ids and weights go from one side to the other."""
    own, _ = mixtures()

    made = Made()
    router = Made.__new__(Made)
    router.__dict__.update(made.__dict__)
    weights = {n: w for n, w in made.weights.items() if n.endswith("mlp.gate.weight")}
    store = dict(made.store) | {n: packed({"w": w}, "Q8_0")["w"] for n, w in weights.items()}
    router.weights = made.weights | {n: torch.from_numpy(store[n].expand()) for n in weights}
    router.native = NativeExecutor(own, store, made.layout, made.script.num_blocks, 400, kv_dtype="fp32")
    assert router.native.host_ops == ("route",)
    router.agrees_with(own)
    from plait.ops import reference

    reference.ACTIVATIONS["cubed"] = lambda x, **_: x**3
    try:
        other = changed(own, "experts", kind="cubed")
        made = Made(other)
        assert made.native.host_ops == ("experts",)
        made.agrees_with(other)
    finally:
        del reference.ACTIVATIONS["cubed"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@every_family
def test_random_schedules(family: str, seed: int) -> None:
    pair = Pair(make(CONFIGS[family], seed=seed))
    random = np.random.default_rng(seed)
    for _ in range(12):
        chosen = random.permutation(4)[: random.integers(1, 5)]
        left = [(int(s), pair.script.tokens - pair.script.computed[s]) for s in chosen]
        parts = [(s, int(min(n, random.choice([1, 1, 2, 17, 60])))) for s, n in left if n]
        total = sum(n for _, n in parts)
        if total:
            pair.agree(parts, random.permutation(total)[: random.integers(0, min(total, 9) + 1)].tolist())
