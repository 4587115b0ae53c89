"""Latent attention on the native plan: both forms, layouts, steps in a row, threads, what has no kernel, packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plait.bench.costs import measure_costs
from plait.engine.build import build_engine
from plait.errors import WeightError
from plait.kernels.native import native_library, reason
from plait.memory.layout import make_layout
from plait.memory.paged import PagedMemory
from plait.ops.interpreter import Interpreter
from plait.ops.latent import expands
from plait.ops.spec import LatentSpec
from plait.ops.step import StepInputs
from plait.plan.executor import NativeExecutor
from plait.plan.fusion import fuse
from plait.plan.load import load_native
from plait.plan.lower import lower
from plait.weights.latent import make_second
from plait.weights.pack import pack_decoder
from plait.weights.store import is_second, second_name
from tests.plan.latents import ATTEND_COST, SPECS, VOCABULARY, latents, with_second
from tests.plan.models import PlainWeight, layouts_of, make, packed, slow_but
from tests.plan.plan_model import PlanModel
from tests.plan.steps import MIXED, Script
from tests.plan.test_lower import SHORT, WIDE, replay
from tests.plan.test_native_executor import Pair
from tests.threads import one_thread

__all__ = ["one_thread"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}"),
]
FORMS = ("auto", "expanded", "absorbed")
KV_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Made:
    """The recording of tests.plan.latents on the native plan."""

    def __init__(
        self,
        form: str = "auto",
        layouts: str | Callable[[str], str] = "F32",
        kv: str = "fp32",
        specs: tuple[LatentSpec, ...] = SPECS,
    ) -> None:
        self.recording, self.weights = latents(form, specs)
        self.layout = make_layout(self.recording.caches, KV_BYTES[kv], context_tokens=384, chunk_tokens=384)
        self.store = with_second(self.weights, self.recording, layouts)
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kv]
        self.script = Script(self.layout, VOCABULARY)
        self.native = NativeExecutor(self.recording, self.store, self.layout, self.script.num_blocks, 400, kv_dtype=kv)

    def agrees(self, parts=MIXED, tolerance: float = 1e-4) -> None:
        """With the reference of the recording, at every token."""
        memory = PagedMemory(self.layout, self.script.num_blocks, self.dtype)
        interpreter = Interpreter(self.recording, self.weights)
        for part in parts:
            step = self.script.step(part)
            got, tensor = self.native.execute(*step, hidden=True), torch.from_numpy(step[0]).long()
            with torch.inference_mode():
                begun = memory.begin(tensor, step[1])
                rows = torch.from_numpy(step[1].logit_rows).long()
                values = {"ids": tensor, "positions": begun.positions, "logit_rows": rows}
                expected = interpreter.run(values, begun)
            scale = max(1.0, float(expected["logits"].abs().max()) / 10)
            assert np.abs(got.logits - expected["logits"].numpy()).max() <= tolerance * scale
            assert np.abs(got.hidden - expected["hidden"].numpy()).max() <= tolerance * scale


@pytest.mark.parametrize("form", FORMS)
def test_the_plan_gives_what_the_reference_gives(form: str) -> None:
    made = Made(form)
    assert made.native.host_ops == ()
    made.agrees()


def test_steps_of_the_script_take_both_forms() -> None:
    taken = [set() for _ in SPECS]
    computed = [0] * 4
    for step in MIXED:
        for sequence, tokens in step:
            computed[sequence] += tokens
            for k, spec in enumerate(SPECS):
                taken[k].add(expands(tokens, computed[sequence], spec, ATTEND_COST))
    assert taken == [{True, False}] * len(SPECS)


@pytest.mark.parametrize("fused", [True, False])
def test_the_plan_means_the_recording_wherever_its_memory_lies(fused: bool) -> None:
    """By the model of the runtime, which begins with garbage in all memory."""
    recording, weights = latents()
    layout = make_layout(recording.caches, context_tokens=384, chunk_tokens=384)
    forms = layouts_of(weights, "F32")
    store = {n: PlainWeight(n, w.numpy(), forms[n]) for n, w in weights.items()}
    plan = lower(fuse(recording) if fused else recording, store, layout, 64, 64)
    assert plan.host_ops == () and list(plan.latents.values()) == [spec.latent_width for spec in SPECS]
    script = Script(layout, VOCABULARY)
    steps = [script.step(parts) for parts in SHORT]
    model = PlanModel(plan, store, layout, script.num_blocks)
    for (ids, inputs), expected in zip(
        steps, replay(recording, weights, layout, steps, script.num_blocks), strict=True
    ):
        logits, hidden = model.step(ids, inputs)
        assert np.abs(logits - expected["logits"].numpy()).max() <= 1e-4
        assert np.abs(hidden - expected["hidden"].numpy()).max() <= 1e-4


@pytest.mark.parametrize("kv", ["bf16", "fp16"])
@pytest.mark.parametrize("form", FORMS)
def test_keys_and_values_in_16_bits(form: str, kv: str) -> None:
    """Where a number lies between two of 16 bits, the two may take different ones."""
    Made(form, kv=kv).agrees(SHORT, 2e-2 if kv == "bf16" else 2e-3)


@pytest.mark.parametrize("layouts", ["BF16", "F16", "Q8_0", lambda name: "Q8_0" if name in ("w5", "w12") else "F32"])
@pytest.mark.parametrize("form", FORMS)
def test_layouts(form: str, layouts: str | Callable[[str], str]) -> None:
    """Against the reference with the numbers that are packed; activations are rounded to 8 bits, or to bf16."""
    made = Made(form, layouts)
    assert made.native.host_ops == ()
    made.agrees(SHORT, 0.1)


def decoding(made: Made) -> tuple[np.ndarray, StepInputs]:
    ids, inputs = made.script.step([(0, 3), (1, 37), (2, 130)])
    made.native.execute(ids, inputs)
    return made.script.step([(0, 1), (1, 1), (2, 1)])


@pytest.mark.parametrize("form", FORMS)
def test_steps_in_a_row_are_those_one_by_one(form: str) -> None:
    one, many = Made(form), Made(form)
    ids, inputs = decoding(one)
    first, _ = decoding(many)
    got_ids, got_values = many.native.execute_steps(first, inputs, 20, 60.0, np.array([], np.int32))
    assert len(got_ids) == 20
    for done in range(20):
        s = inputs.sequences
        now = type(s)(s.query_start, s.context_len + np.int32(done), s.block_table)
        result = one.native.execute(ids, StepInputs(sequences=now, logit_rows=inputs.logit_rows), logits=False)
        ids = result.best_ids.copy()
        assert np.array_equal(got_ids[done], ids) and np.array_equal(got_values[done], result.best_values)


@pytest.mark.parametrize("layouts", ["F32", "Q8_0"])
def test_the_same_bits_with_any_number_of_threads_and_whatever_runs_beside(layouts: str) -> None:
    library = native_library()
    assert library is not None
    found = []
    try:
        for threads in (1, 2, 3):
            library.set_threads(threads)
            together, alone = Made(layouts=layouts), Made(layouts=layouts)
            both = together.native.execute(*together.script.step([(1, 40), (0, 90)])).logits.copy()
            single = alone.native.execute(*alone.script.step([(0, 90)])).logits.copy()
            assert np.array_equal(single, both[40:])
            found.append(both)
    finally:
        library.set_threads(0)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize(
    "change",
    [{"nope_width": 24}, {"value_width": 10}, {"latent_width": 40}, {"latent_width": 33}],
    ids=str,
)
def test_widths_that_are_no_panels_run_through_the_reference_over_the_same_pool(change: dict[str, int]) -> None:
    for form in FORMS:
        recording, weights = latents(form, (replace(SPECS[0], **change), SPECS[1]))
        layout = make_layout(recording.caches, context_tokens=384, chunk_tokens=384)
        script = Script(layout, VOCABULARY)
        store = packed(weights)
        second = next(op for op in reversed(recording.ops) if op.name == "attend_latent")
        (ref,) = second.weights
        store.add(make_second(store[ref.name], SPECS[1], 1))
        native = NativeExecutor(recording, store, layout, script.num_blocks, 400, kv_dtype="fp32")
        assert "attend_latent" in native.host_ops and native.lowered.latents == {1: SPECS[1].latent_width}
        steps = [script.step(p) for p in SHORT]
        for step, expected in zip(steps, replay(recording, weights, layout, steps, script.num_blocks), strict=True):
            assert np.abs(native.execute(*step).logits - expected["logits"].numpy()).max() <= 1e-4


WIDE_FAMILIES = ["deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"]


@pytest.mark.parametrize("family", slow_but(("deepseek_v3", "minicpm3"), WIDE_FAMILIES))
def test_no_operation_of_a_family_is_left_to_the_reference(family: str) -> None:
    pair = Pair(make(WIDE[family]))
    assert pair.native.host_ops == () and "attend_latent" in {op.kind for op in pair.native.lowered.ops}
    for parts in MIXED:
        pair.agree(parts)


def test_a_refresh_makes_the_second_layout_anew_in_its_standing_buffer() -> None:
    decoder = make(WIDE["deepseek_v3"])
    pair = Pair(decoder)
    seconds = {name: weight.data.ctypes.data for name, weight in pair.store.items() if is_second(name)}
    assert len(seconds) == len(decoder.config.layers)
    pair.agree([(0, 5)])
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    pair.native.refresh(pack_decoder(decoder, store=pair.store))
    assert seconds == {name: weight.data.ctypes.data for name, weight in pair.store.items() if is_second(name)}
    fresh = Pair(decoder)
    fresh.agree([(0, 5)])
    again = pair.script
    again.computed[0] = 0
    pair.agree([(0, 5)])


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    make(WIDE["deepseek_v3"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_checkpoint_is_packed_with_its_second_layouts_and_mapped_with_them(directory: Path) -> None:
    first, second = load_native(directory), load_native(directory)
    assert (first.cached, second.cached) == (False, True)
    found = [name for name in first.store if is_second(name)]
    assert len(found) == len(first.config.layers)
    for native in (first, second):
        assert native.report.second_bytes == native.store.second_bytes == sum(first.store[n].nbytes for n in found)
        assert native.report.weight_bytes == native.store.nbytes
        assert any("a second layout of latent attention's weights" in line for line in native.report.lines())
        assert "#" not in str(native.store.layouts()) and sum(native.store.layouts().values()) == sum(
            weight.layout != "VECTOR" and not is_second(name) for name, weight in native.store.items()
        )
        for name in found:
            assert np.array_equal(native.store[name].data, first.store[name].data)


def test_a_packed_decoder_shows_its_parameters_only(directory: Path, tmp_path: Path) -> None:
    native = load_native(directory)
    own = make(WIDE["deepseek_v3"]).state_dict()
    packed_state = native.decoder.state_dict()
    assert packed_state.keys() == own.keys()
    assert all(torch.equal(packed_state[name].float(), own[name].float()) for name in own)
    native.decoder.save_pretrained(tmp_path / "again")
    assert load_native(tmp_path / "again", use_cache=False).store.keys() == native.store.keys()


def test_an_engine_reports_the_bytes_of_the_second_layout() -> None:
    bundle = build_engine(make(WIDE["deepseek_v3"]), plan="native", max_model_len=64, kv_memory=2**20)
    assert bundle.loaded.native is not None
    assert bundle.report["second_layout_bytes"] == bundle.loaded.native.store.second_bytes > 0


@pytest.mark.parametrize("layouts", ["F32", "Q8_0"])
def test_costs_count_the_second_layout_in_place_of_the_rows_that_make_keys(layouts: str) -> None:
    made = Made(layouts=layouts)
    native = SimpleNamespace(store=made.store, recording=made.recording)
    bundle: Any = SimpleNamespace(loaded=SimpleNamespace(native=native), engine=SimpleNamespace(executor=made.native))
    expected = sum(weight.nbytes for name, weight in made.store.items() if name != "w0")  # the embedding
    for op in made.recording.ops:
        if op.name == "attend_latent":
            spec = LatentSpec(**op.attrs["spec"])
            expected -= made.store[op.weights[0].name].nbytes * spec.nope_width // (spec.nope_width + spec.value_width)
    costs = measure_costs(bundle)
    assert costs.weight_bytes == expected
    assert costs.bytes_read(10) - costs.weight_bytes == 10 * 4 * sum(spec.row_width for spec in SPECS)


def test_a_store_without_the_second_layout_is_refused_by_name() -> None:
    recording, weights = latents()
    layout = make_layout(recording.caches, context_tokens=384, chunk_tokens=384)
    with pytest.raises(WeightError, match="w5 has no second layout"):
        NativeExecutor(recording, packed(weights), layout, 9, 16, kv_dtype="fp32")


@pytest.mark.parametrize("layouts", ["F32", "BF16", "F16", "Q8_0"])
def test_the_second_layout_holds_the_transposed_rows(layouts: str) -> None:
    made = Made(layouts=layouts)
    names = [op.weights[0].name for op in made.recording.ops if op.name == "attend_latent"]
    assert sorted(name for name in made.store if is_second(name)) == sorted(map(second_name, names))
    for name, spec in zip(names, SPECS, strict=True):
        own = made.store.expand(name).reshape(spec.num_heads, -1, spec.latent_width)[:, : spec.nope_width]
        second = made.store[second_name(name)]
        assert second.layout == (layouts if layouts != "Q8_0" else "BF16")
        want = torch.from_numpy(own).transpose(1, 2)
        assert torch.equal(torch.from_numpy(second.expand()), want.bfloat16().float() if layouts == "Q8_0" else want)
