"""Latent attention of a plan against float64: both forms, any batch, any number of threads, every instruction set."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from plait.kernels import abi, native
from plait.ops.latent import expands
from plait.ops.spec import LatentSpec
from tests.kernels import quant_model
from tests.kernels.quant_model import Records, isa_names
from tests.kernels.toy_plan import Builder, Plan, Steps, functions

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
FORMS = ("expanded", "absorbed")
VOCABULARY = 8


@dataclass(frozen=True)
class Shape:
    """Of one layer, and how its numbers are kept. second: layout of the transposed rows."""

    heads: int
    latent: int
    nope: int
    rope: int
    value: int
    weight: str = "F32"
    kv: str = "fp32"
    block: int = 16

    @property
    def key(self) -> int:
        return self.nope + self.rope

    @property
    def row(self) -> int:
        return self.latent + self.rope

    @property
    def second(self) -> str:
        return self.weight if self.weight in abi.FLOAT_LAYOUTS else "BF16"

    @property
    def quantised(self) -> bool:
        return self.weight not in abi.FLOAT_LAYOUTS


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(kind).float().numpy()


class Layer:
    """A plan of WRITE_KV and ATTEND_LATENT; the test writes operands and cache where they lie.

    contexts: of the sequences, whose earlier rows are in the cache from the beginning. Memory that nobody wrote is NaN.
    """

    def __init__(self, shape: Shape, contexts: list[int], form: str = "auto", cost: float = 1.0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.shape = s = shape
        self.most = 160
        b = self.builder = Builder(self.most, 1, VOCABULARY)
        w = b.matrix(rng, s.heads * (s.nope + s.value), s.latent, s.weight, s.latent**-0.5)
        self.weight = b.values[w].astype(np.float64).reshape(s.heads, s.nope + s.value, s.latent)
        turned = np.ascontiguousarray(self.weight[:, : s.nope].transpose(0, 2, 1).reshape(-1, s.nope), np.float32)
        packed = quant_model.pack(turned, "F32", s.second, s.nope)
        b.keep.append(packed)
        b.matrices.append(packed.matrix)
        self.turned = quant_model.unpack(packed).astype(np.float64).reshape(s.heads, s.latent, s.nope)
        # Every sequence has blocks of its own, in any order; block 0 is nobody's.
        per = max(-(-n // s.block) for n in contexts)
        self.table = (1 + rng.permutation(len(contexts) * per)).astype(np.int32).reshape(len(contexts), per)
        size = 4 if s.kv == "fp32" else 2
        self.stride = s.block * s.row * size
        self.pool = quant_model.aligned((self.table.size + 1) * self.stride)
        self.pool[:] = 0xFF  # NaN in every type
        self.cache = abi.Cache(
            base=self.pool.ctypes.data,
            block_stride=self.stride,
            block_tokens=s.block,
            num_kv_heads=1,
            key_width=s.row,
            kv_type=abi.KV_TYPES[s.kv],
            latent_width=s.latent,
        )
        b.caches.append(self.cache)
        self.rows = [rng.standard_normal((n, s.row)).astype(np.float32) for n in contexts]
        self.q = [rng.standard_normal((n, s.heads, s.key)).astype(np.float32) for n in contexts]
        # Scores of a deviation of about 1.5, so that neither one key nor all of them decide.
        spread = np.sqrt(1.0 * s.rope + s.latent * (self.weight[:, : s.nope] ** 2).sum((1, 2)).mean() / s.latent)
        self.scale = float(np.float32(1.5 / spread))
        self.in_q, self.in_latent = b.buffer(s.heads * s.key), b.buffer(s.latent)
        self.in_rope = b.buffer(s.rope) if s.rope else -1
        self.out = b.buffer(s.heads * s.value)
        b.op("write_kv", [self.in_latent, self.in_rope])
        i = (0, s.heads, s.nope, s.value, abi.LATENT_FORMS[form])
        b.op("attend_latent", self.in_q, self.out, [w, w + 1], i, (self.scale, cost))
        self.form, self.cost = form, cost
        self.plan: Plan = b.create()

    @property
    def spec(self) -> LatentSpec:
        s = self.shape
        return LatentSpec(s.heads, s.latent, s.nope, s.rope, s.value, self.scale, self.form)

    def write(self, buffer: int, values: np.ndarray) -> None:
        if buffer < 0 or not len(values):
            return
        found = self.builder.buffers[buffer]
        address = functions().plait_plan_buffer(self.plan.handle, buffer)
        memory = np.frombuffer((ctypes.c_uint8 * (len(values) * found.row_bytes)).from_address(address), np.uint8)
        bits = np.ascontiguousarray(values, np.float32).reshape(len(values), -1).view(np.uint8)
        memory.reshape(len(values), -1)[:, : bits.shape[1]] = bits

    def run(self, parts: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """parts: (sequence, first token of the step, tokens). -> float32 [tokens, heads, value] of each part."""
        s = self.shape
        start = [0, *np.cumsum([n for _, _, n in parts]).tolist()]
        for sequence, first, _ in parts:
            if first:
                table = self.table[sequence]
                rows = np.ascontiguousarray(self.rows[sequence][:first])
                status = functions().plait_write_kv(
                    None, ctypes.byref(self.cache), table.ctypes.data, 0, first, rows.ctypes.data, None
                )
                assert status == 0
        take = lambda arrays: np.concatenate([arrays[i][a : a + n] for i, a, n in parts])  # noqa: E731
        rows = take(self.rows)
        self.write(self.in_q, take(self.q))
        self.write(self.in_latent, rows[:, : s.latent])
        self.write(self.in_rope, rows[:, s.latent :])
        table = self.table[[i for i, _, _ in parts]][None]
        step = Steps([0] * start[-1], start, [a + n for _, a, n in parts], table, [], VOCABULARY, 1, want_logits=False)
        self.plan.run(step)
        out = self.plan.rows(self.out, start[-1]).copy().reshape(-1, s.heads, s.value)
        return [out[a:b] for a, b in pairwise(start)]

    def expected(self, part: tuple[int, int, int], form: str) -> tuple[np.ndarray, np.ndarray]:
        """The result in float64, and what a rounding of the absorbed form's results to 8 bits may add to it."""
        s, (sequence, first, tokens) = self.shape, part
        context = first + tokens
        cached = rounded(self.rows[sequence][:context], s.kv).astype(np.float64)
        latent, rope = cached[:, : s.latent], cached[:, s.latent :]
        q = self.q[sequence][first:context].astype(np.float64)
        nope = q[..., : s.nope]
        bf16_dot = functions().plait_isa() == b"avx512_bf16"  # products with bf16 round what they multiply
        if form == "expanded":
            given = latent
            if s.quantised:
                given = records(latent)
            elif s.weight == "BF16" and bf16_dot:
                given = rounded(latent, "bf16").astype(np.float64)
            keys = np.einsum("hnr,cr->chn", self.weight[:, : s.nope], given, optimize=True)
            scores = np.einsum("thn,chn->thc", nope, keys, optimize=True)
        else:
            if s.second == "BF16" and bf16_dot:
                nope = rounded(nope, "bf16").astype(np.float64)
            query = np.einsum("hrn,thn->thr", self.turned, nope, optimize=True)
            scores = np.einsum("thr,cr->thc", query, latent, optimize=True)
        scores = (scores + np.einsum("thp,cp->thc", q[..., s.nope :], rope, optimize=True)) * self.scale
        seen = np.arange(first, context)[:, None] >= np.arange(context)
        scores = np.where(seen[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        up = self.weight[:, s.nope :]
        if form == "expanded":
            values = np.einsum("hvr,cr->chv", up, given, optimize=True)
            out = np.einsum("thc,chv->thv", weights, values, optimize=True)
            return out, np.zeros_like(out)
        mixed = np.einsum("thc,cr->thr", weights, latent, optimize=True)
        off = np.zeros_like(mixed)
        if s.quantised:
            largest = np.abs(mixed.reshape(tokens, s.heads, -1, 32)).max(-1)
            off = np.repeat(largest / 127 * 0.51, 32, -1)
        elif s.weight == "BF16" and bf16_dot:
            off = np.abs(mixed) * 2.0**-8
        return (
            np.einsum("hvr,thr->thv", up, mixed, optimize=True),
            np.einsum("hvr,thr->thv", np.abs(up), off, optimize=True),
        )

    def check(self, parts: list[tuple[int, int, int]]) -> None:
        results = self.run(parts)
        # A value of a head has this deviation; errors of float32 chains grow with their length.
        size = float(np.sqrt((self.weight[:, self.shape.nope :] ** 2).sum(-1).mean()))
        for part, got in zip(parts, results, strict=True):
            form = self.form
            if form == "auto":
                form = FORMS[0] if expands(part[2], part[1] + part[2], self.spec, self.cost) else FORMS[1]
            want, off = self.expected(part, form)
            far = np.abs(got - want) - off
            assert far.max() < 2e-5 * size, f"{form} {part}: {far.max() / size} of a value's deviation"


def records(x: np.ndarray) -> np.ndarray:
    """x [rows, cols] as the kernels quantise it, float64."""
    rows, cols = x.shape
    given = np.ascontiguousarray(x, np.float32)
    data = np.zeros((rows, functions().plait_quantised_row_bytes(cols)), np.uint8)
    assert functions().plait_quantise(None, given.ctypes.data, cols, rows, cols, data.ctypes.data) == 0
    return Records(data, cols).values()


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
