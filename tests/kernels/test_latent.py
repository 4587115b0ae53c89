"""Latent attention of a plan against float64: both forms, any batch, any number of threads, every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from plait.kernels import abi, native
from plait.ops.latent import expands
from tests.kernels import quant_model
from tests.kernels.latent_layer import FORMS, Layer, Shape
from tests.kernels.quant_model import isa_names
from tests.kernels.toy_plan import Builder, Plan

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")

SHAPES = {
    "one head": Shape(1, 32, 16, 16, 16),
    "four": Shape(4, 64, 32, 16, 48, "BF16", "bf16", 8),
    "as in V2 Lite": Shape(16, 512, 128, 64, 128, "Q8_0", "bf16"),
    "as many as in V3": Shape(128, 128, 32, 16, 32, "BF16", "fp16"),
    "as in MiniCPM3": Shape(40, 256, 64, 32, 64, "Q4_K", "bf16", 24),
    "no panels alike": Shape(5, 96, 48, 18, 80, "F16", "fp16", 8),
    "without rotation": Shape(3, 48, 16, 0, 32),
    "wide heads": Shape(2, 32, 128, 64, 16, "Q4_0", "fp32", 24),
}
every_shape = pytest.mark.parametrize("name", SHAPES)
every_form = pytest.mark.parametrize("form", FORMS)


@every_form
@every_shape
def test_both_forms_are_float64_attention(name: str, form: str) -> None:
    shape = SHAPES[name]
    layer = Layer(shape, [70, 1, 40, 8, 33], form)
    layer.check([(0, 0, 70), (1, 0, 1), (2, 39, 1), (3, 5, 3), (4, 0, 33)])
    layer.check([(2, 39, 1)])


@every_form
@pytest.mark.parametrize("context", [511, 512, 513, 1025, 5000])
def test_contexts_around_chunks(context: int, form: str) -> None:
    layer = Layer(Shape(4, 64, 16, 16, 32, "F32", "bf16"), [context], form)
    layer.check([(0, context - 1, 1)])
    layer.check([(0, context - 70, 70)])
    layer.check([(0, max(0, context - 130), 3)])


@every_form
def test_more_tokens_than_lie_between_the_phases_at_a_time(form: str) -> None:
    layer = Layer(Shape(128, 512, 16, 2, 16), [100, 20, 3], form)  # 63 tokens of these widths
    layer.check([(1, 19, 1), (0, 5, 95), (2, 0, 3)])


@pytest.mark.parametrize("seed", range(20))
def test_random_layers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = str(rng.choice(["F32", "BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"]))
    unit = 16 if weight in abi.FLOAT_LAYOUTS else quant_model.BLOCKS[weight][0]
    some = lambda low, high, unit: int(rng.integers(low, high + 1)) * unit  # noqa: E731
    shape = Shape(
        int(rng.choice([1, 2, 3, 6, 16, 45, 46])),
        some(1 if unit > 16 else 2, max(1, 320 // unit), unit),
        some(1, 8, 16),
        some(8, 32, 2),
        some(1, 8, 16),
        weight,
        str(rng.choice(["fp32", "bf16", "fp16"])),
        some(1, 4, 8),
    )
    contexts = [int(n) for n in rng.integers(1, 700, 4)]
    layer = Layer(shape, contexts, str(rng.choice(["auto", *FORMS])), float(rng.choice([0.5, 1.0, 2.0])), seed)
    for _ in range(3):
        chosen = rng.permutation(4)[: rng.integers(1, 5)]
        tokens = [min(contexts[i], int(rng.choice([1, 1, 2, 7, 40]))) for i in chosen]
        layer.check([(int(i), contexts[i] - n, n) for i, n in zip(chosen, tokens, strict=True)])


MIXED = [(0, 599, 1), (1, 0, 40), (2, 300, 2), (3, 0, 1), (4, 700, 30)]


def mixed(name: str, form: str) -> Layer:
    return Layer(SHAPES[name], [600, 40, 302, 1, 730], form)


def test_every_sequence_takes_the_form_that_costs_it_less() -> None:
    """To the bit what the form gives when it is forced. In this step some expand and some do not."""
    for name in ("four", "as in MiniCPM3"):
        by_form = {form: mixed(name, form).run(MIXED) for form in FORMS}
        for cost in (0.25, 1.0, 4.0):
            layer = Layer(SHAPES[name], [600, 40, 302, 1, 730], "auto", cost)
            taken = [FORMS[0] if expands(n, first + n, layer.spec, cost) else FORMS[1] for _, first, n in MIXED]
            for i, (form, got) in enumerate(zip(taken, layer.run(MIXED), strict=True)):
                assert np.array_equal(got, by_form[form][i])
            assert len(set(taken)) == 2
        assert not np.array_equal(by_form["expanded"][1], by_form["absorbed"][1])


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("name", ["four", "as in MiniCPM3", "as in V2 Lite", "no panels alike"])
def test_the_same_bits_in_every_batch_and_with_every_number_of_threads(name: str, form: str) -> None:
    layer = mixed(name, form)
    library = native.native_library()
    try:
        library.set_threads(1)
        whole = layer.run(MIXED)
        for threads in (1, 2, 3, 8):
            library.set_threads(threads)
            for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [1, 3], [0], [2, 4]):
                for i, got in zip(order, layer.run([MIXED[i] for i in order]), strict=True):
                    assert np.array_equal(got, whole[i])
    finally:
        library.set_threads(0)


@every_form
def test_tokens_of_one_step_or_of_several(form: str) -> None:
    layer = Layer(SHAPES["no panels alike"], [600], form)
    (together,) = layer.run([(0, 480, 60)])
    for first, tokens in ((480, 1), (481, 20), (501, 38), (539, 1)):
        (got,) = layer.run([(0, first, tokens)])
        assert np.array_equal(got, together[first - 480 : first - 480 + tokens])


@every_form
def test_nan_stays_with_its_sequence_and_with_the_tokens_that_see_it(form: str) -> None:
    for name in ("four", "wide heads"):
        layer = Layer(SHAPES[name], [40, 40], form)
        before = layer.run([(0, 20, 20), (1, 0, 40)])
        layer.rows[0][30, 1] = np.nan
        after = layer.run([(0, 20, 20), (1, 0, 40)])
        assert np.isnan(after[0][10:]).all()
        assert np.array_equal(after[0][:10], before[0][:10]) and np.array_equal(after[1], before[1])


def spoilt(change, shape: Shape = SHAPES["four"]) -> str:
    """What the library says of a layer that was changed before the plan was made."""
    create = Builder.create

    def changed(b: Builder) -> Plan:
        change(b)
        return create(b)

    Builder.create = changed
    try:
        with pytest.raises(ValueError) as error:
            Layer(shape, [4])
    finally:
        Builder.create = create
    return str(error.value)


def test_what_does_not_hold_together_is_refused() -> None:
    def op(which: int = 1, **fields):
        def change(b: Builder) -> None:
            for name, (at, value) in fields.items():
                getattr(b.ops[which], name)[at] = value

        return change

    def of(what: str, number: int, **fields):
        def change(b: Builder) -> None:
            for name, value in fields.items():
                setattr(getattr(b, what)[number], name, value)

        return change

    def another_cache(b: Builder) -> None:
        b.caches.append(abi.Cache.from_buffer_copy(b.caches[0]))
        b.caches[1].value_width, b.caches[1].key_width, b.ops[1].i[0] = 2, 78, 1

    assert "no cache 1" in spoilt(op(i=(0, 1)))
    assert "0 heads" in spoilt(op(i=(1, 0)))
    assert "heads" in spoilt(op(i=(1, 2**31 - 1)))
    assert "a matrix of 320 x 64, 240 x 64 is needed" in spoilt(op(i=(1, 3)))
    assert "multiples of 16" in spoilt(op(i=(2, 24)))
    assert "multiples of 16" in spoilt(op(i=(2, -16)))
    assert "multiples of 16" in spoilt(op(i=(3, 0)))
    assert "a matrix of" in spoilt(op(i=(3, 32)))
    assert "form 3" in spoilt(op(i=(4, 3)))
    assert "form -1" in spoilt(op(i=(4, -1)))
    for cost in (np.nan, -1.0, np.inf):
        assert "times its cost" in spoilt(op(f=(1, cost)))
    assert "no matrix" in spoilt(op(w=(0, -1)))
    assert "no matrix" in spoilt(op(w=(1, -1)))
    assert "a matrix of 256 x 32" in spoilt(op(w=(0, 1)))
    assert "second layout of 320 x 64" in spoilt(op(w=(1, 0)))
    assert "no input" in spoilt(op(inputs=(0, -1)))
    assert "no output" in spoilt(op(outputs=(0, -1)))
    assert "one input and one output" in spoilt(op(inputs=(2, 1)))
    assert "one input and one output" in spoilt(op(outputs=(1, 1)))
    assert "wide" in spoilt(of("buffers", 0, width=4 * 48 - 1))
    assert "wide" in spoilt(of("buffers", 3, width=4 * 48 - 1))
    assert "kind" in spoilt(of("buffers", 3, kind=abi.KIND_I32))
    assert "wrong kind of rows" in spoilt(of("buffers", 0, rows=abi.ROWS_LOGITS))
    assert "share memory" in spoilt(of("buffers", 3, offset=0))
    assert "values of its own" in spoilt(another_cache)
    assert "latent width 0" in spoilt(of("caches", 0, latent_width=0))
    assert "write_kv" in spoilt(of("caches", 0, latent_width=48))
    assert "write_kv" in spoilt(op(0, inputs=(1, -1)))
    assert "write_kv" in spoilt(op(0, inputs=(0, 0)))
    assert "write_kv" in spoilt(op(0, inputs=(1, 1)), SHAPES["without rotation"])


@pytest.mark.slow
def test_every_instruction_set() -> None:
    """A plan takes one set per process: the checks above again, in processes of their own."""
    code = (
        "from tests.kernels.test_latent import *\n"
        "for name in SHAPES:\n"
        "    for form in FORMS:\n"
        "        Layer(SHAPES[name], [30, 1, 530], form).check([(0, 10, 20), (1, 0, 1), (2, 529, 1)])\n"
        "print(native.native_library().functions.plait_isa().decode())\n"
    )
    for isa in isa_names():
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PLAIT_ISA": isa},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [isa]
