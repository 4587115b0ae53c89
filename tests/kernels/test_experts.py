"""The experts of a step: halves and sums against float64, whatever the batch, the threads and the instruction set.

As in test_plan_runtime, every half is judged by itself: its outputs against numpy on its own inputs as the plan left
them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from plait.kernels import abi, native
from tests.kernels import quant_model
from tests.kernels.quant_model import Packed, isa_names
from tests.kernels.toy_plan import LOGITS, TOKENS, Builder, Plan, Steps, functions, record_values

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")


@dataclass(frozen=True)
class Shape:
    """up, down: layouts of the stacks. rows: LOGITS for experts over the rows whose logits are wanted."""

    experts: int
    top_k: int
    width: int
    hidden: int
    up: str = "F32"
    down: str = "F32"
    biased: bool = False
    gated: bool = True
    activation: str = "silu"
    rows: int = TOKENS

    @property
    def parts(self) -> int:
        return 2 if self.gated else 1


def stack(
    b: Builder, rng: np.random.Generator, count: int, rows: int, cols: int, layout: str
) -> tuple[int, np.ndarray]:
    """`count` random matrices one after another, each padded to whole panels: number, values [count, rows, cols]."""
    values, packed = [], []
    for _ in range(count):
        number = b.matrix(rng, rows, cols, layout)
        one: Packed = b.keep[-1]
        packed.append(one.data[: -(-rows // abi.PANEL_ROWS) * b.matrices[number].panel_bytes])
        values.append(b.values[number])
        b.matrices.pop(), b.values.pop(), b.keep.pop()
        panel_bytes = one.matrix.panel_bytes
    data = quant_model.aligned(sum(len(p) for p in packed))
    data[:] = np.concatenate(packed)
    b.keep.append(data)
    total = len(data) // panel_bytes * abi.PANEL_ROWS
    b.matrices.append(abi.Matrix(abi.LAYOUTS[layout], 0, total, cols, panel_bytes, data.ctypes.data))
    b.values.append(np.empty(0))
    return len(b.matrices) - 1, np.array(values).astype(np.float64)


def in_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x.astype(np.float32)).bfloat16().double().numpy()


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class Mixture:
    """A plan of EXPERTS alone (and what quantises its input); the test writes the operands where they lie."""

    MOST = 72

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.shape = s = shape
        b = self.builder = Builder(self.MOST, self.MOST, 8)
        w_up, self.up = stack(b, rng, s.experts * s.parts, s.hidden, s.width, s.up)
        w_down, self.down = stack(b, rng, s.experts, s.width, s.hidden, s.down)
        self.up_bias = rng.standard_normal((s.experts, s.parts, s.hidden)).astype(np.float32) * s.biased
        self.down_bias = rng.standard_normal((s.experts, s.width)).astype(np.float32) * s.biased
        biases = [b.vector(x.ravel()) if s.biased else -1 for x in (self.up_bias, self.down_bias)]
        self.x = b.buffer(s.width, s.rows)
        self.given = self.x
        self.input_quantised, self.hidden_quantised = (form not in abi.FLOAT_LAYOUTS for form in (s.up, s.down))
        if self.input_quantised:
            self.given = b.buffer(s.width, s.rows, abi.KIND_Q8)
            b.op("quantise", self.x, self.given)
        self.ids, self.weights = b.buffer(s.top_k, s.rows, abi.KIND_I32), b.buffer(s.top_k, s.rows)
        self.out = b.buffer(s.width, s.rows)
        record = functions().plait_quantised_row_bytes
        slot = record(s.hidden) if self.hidden_quantised else round_up(4 * s.hidden, 64)
        kind = abi.KIND_Q8 if self.hidden_quantised else abi.KIND_F32
        self.hidden = self.slots(slot, s.hidden, kind)
        self.results = self.slots(round_up(4 * s.width, 64) if s.width >= 32 else 128, s.width, abi.KIND_F32)
        i = (abi.ACTIVATIONS[s.activation], s.experts, int(s.gated))
        outputs = [self.out, self.hidden, self.results]
        b.op("experts", [self.given, self.ids, self.weights], outputs, [w_up, biases[0], w_down, biases[1]], i)
        self.plan: Plan = b.create()

    def slots(self, slot: int, width: int, kind: int) -> int:
        b, k = self.builder, self.shape.top_k
        b.buffers.append(abi.Buffer(b.arena_bytes, k * slot, self.shape.rows, kind, k * width, 0))
        b.arena_bytes += self.MOST * k * slot
        return len(b.buffers) - 1

    def write(self, buffer: int, values: np.ndarray) -> None:
        found = self.builder.buffers[buffer]
        address = functions().plait_plan_buffer(self.plan.handle, buffer)
        if not len(values):
            return
        size = len(values) * found.row_bytes
        rows = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8).reshape(len(values), -1)
        rows[:, : 4 * found.width] = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)

    def run(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The sums, float32 [tokens, width]."""
        n = len(x)
        self.write(self.x, x.astype(np.float32))
        self.write(self.ids, ids.astype(np.int32))
        self.write(self.weights, weights.astype(np.float32))
        # Rows with logits: of a step with twice as many tokens.
        tokens = min(2 * n, self.MOST) if self.shape.rows == LOGITS else n
        rows = list(range(tokens))[-n:] if self.shape.rows == LOGITS else []
        step = Steps([0] * tokens, [0, tokens], [tokens], np.zeros((0, 1, 1)), rows, 8, 1, want_logits=False)
        self.plan.run(step)
        return self.plan.rows(self.out, n).copy() if n else np.empty((0, self.shape.width), np.float32)

    def read_slots(self, buffer: int, count: int, width: int, kind: int) -> np.ndarray:
        """The first `count` slots: float64 [count, width]."""
        slot = self.builder.buffers[buffer].row_bytes // self.shape.top_k
        address = functions().plait_plan_buffer(self.plan.handle, buffer)
        data = np.frombuffer((ctypes.c_uint8 * (count * slot)).from_address(address), np.uint8).reshape(count, slot)
        if kind == abi.KIND_Q8:
            return record_values(data, width)
        return data[:, : 4 * width].copy().view(np.float32).astype(np.float64)

    def check(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> None:
        s, n = self.shape, len(x)
        out = self.run(x, ids, weights)
        given = self.plan.rows(self.given, n).astype(np.float64)
        # Choices by expert; those of one expert in the order of the tokens.
        order = np.argsort(ids.ravel(), kind="stable")
        expert, token = ids.ravel()[order], order // s.top_k
        hidden = self.read_slots(self.hidden, n * s.top_k, s.hidden, abi.KIND_Q8 if self.hidden_quantised else 0)
        results = self.read_slots(self.results, n * s.top_k, s.width, 0)
        up = self.up.reshape(s.experts, s.parts, s.hidden, s.width)
        down_allowed = np.empty_like(results)
        # With instructions for pairs of bf16, what meets a bf16 weight is rounded to bf16 too.
        bf16_dot = functions().plait_isa() == b"avx512_bf16"
        rounds_input, rounds_hidden = (bf16_dot and form == "BF16" for form in (s.up, s.down))
        if rounds_input:
            given = in_bf16(given)
        multiplied = in_bf16(hidden) if rounds_hidden else hidden
        for row in range(n * s.top_k):
            e, v = expert[row], given[token[row]]
            products, sizes = up[e] @ v + self.up_bias[e], np.abs(up[e]) @ np.abs(v) + np.abs(self.up_bias[e])
            function, slope = ACTIVATIONS[s.activation]
            expected = function(products[0])
            allowed = 1e-5 * sizes[0] * slope
            if s.gated:
                allowed = allowed * np.abs(products[1]) + 1e-5 * sizes[1] * np.abs(expected)
                expected = expected * products[1]
            allowed += 1e-5 * np.abs(expected) + 1e-6
            if self.hidden_quantised:  # the roundings of the record come on top
                largest = np.abs(hidden[row].reshape(-1, 32)).max(1) + 1e-30
                allowed = allowed + np.repeat(largest / 127 * 0.51, 32)
            assert (np.abs(hidden[row] - expected) <= allowed).all()
            size = np.abs(self.down[e]) @ np.abs(multiplied[row]) + np.abs(self.down_bias[e])
            down_allowed[row] = 1e-5 * size + 1e-30
            expected = self.down[e] @ multiplied[row] + self.down_bias[e]
            assert (np.abs(results[row] - expected) <= down_allowed[row]).all()
        of_choice = results[np.argsort(order, kind="stable")].reshape(n, s.top_k, s.width)
        terms = weights.astype(np.float64)[..., None] * of_choice
        assert (np.abs(out - terms.sum(1)) <= 1e-6 * np.abs(terms).sum(1) + 1e-30).all()
        # And from the tokens to the sums, where nothing is rounded on the way but to fp32.
        if not self.hidden_quantised and not rounds_hidden:
            function = ACTIVATIONS[s.activation][0]
            for t in range(n):
                total, size = np.zeros(s.width), np.zeros(s.width)
                for j, e in enumerate(ids[t]):
                    products = up[e] @ given[t] + self.up_bias[e]
                    v = function(products[0]) * (products[1] if s.gated else 1)
                    total += weights[t, j] * (self.down[e] @ v + self.down_bias[e])
                    sizes = (np.abs(up[e]) @ np.abs(given[t]) + np.abs(self.up_bias[e])).prod(0)
                    size += abs(weights[t, j]) * (np.abs(self.down[e]) @ sizes + np.abs(self.down_bias[e]))
                assert (np.abs(out[t] - total) <= 1e-5 * size + 1e-30).all()


# Function, and a bound of its slope.
ACTIVATIONS = {
    "silu": (lambda x: x / (1 + np.exp(-np.maximum(x, -500))), 1.1),
    "gelu_tanh": (lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), 1.15),
    "relu": (lambda x: np.maximum(x, 0), 1.0),
}


def operands(shape: Shape, tokens: int, seed: int = 0, among: int | None = None) -> tuple[np.ndarray, ...]:
    """Random tokens, each with k different experts, of the first `among` if that is given."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, shape.width)).astype(np.float32)
    ids = [rng.permutation(among or shape.experts)[: shape.top_k] for _ in range(tokens)]
    weights = rng.standard_normal((tokens, shape.top_k)).astype(np.float32)
    return x, np.array(ids, np.int32).reshape(tokens, shape.top_k), weights


SHAPES = [
    Shape(1, 1, 16, 16),
    Shape(4, 2, 40, 24, biased=True),
    Shape(7, 3, 5, 3, activation="gelu_tanh"),
    Shape(64, 8, 48, 17, "BF16", "F16"),
    Shape(8, 2, 33, 70, "F16", "BF16", gated=False, activation="relu", biased=True),
    Shape(8, 2, 64, 96, "Q4_0", "Q8_0"),
    Shape(16, 4, 96, 160, "Q4_1", "Q5_0", biased=True),
    Shape(5, 5, 256, 32, "Q4_K", "Q5_1", rows=LOGITS),
    Shape(6, 2, 32, 256, "Q8_0", "Q6_K", gated=False, activation="gelu_tanh"),
    Shape(9, 3, 64, 64, "F32", "Q4_0", rows=LOGITS),
    Shape(9, 3, 64, 40, "Q8_0", "F32"),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=[f"{s.experts}-{s.top_k}-{s.up}-{s.down}" for s in SHAPES])


@every_shape
def test_any_number_of_tokens(shape: Shape) -> None:
    mixture = Mixture(shape)
    for tokens in (0, 1, 2, 3, 13, 31, 70):
        if tokens == 0:
            assert mixture.run(*operands(shape, 0)).shape == (0, shape.width)
        else:
            mixture.check(*operands(shape, tokens, seed=tokens))


@every_shape
def test_all_tokens_on_few_experts(shape: Shape) -> None:
    """The others have none; with k of them every token takes the same ones."""
    mixture = Mixture(shape)
    for tokens in (1, 5, 70):
        mixture.check(*operands(shape, tokens, among=shape.top_k))
    x, ids, weights = operands(shape, 9)
    ids[:] = shape.experts - 1  # the same expert k times
    mixture.check(x, ids, weights)


@pytest.mark.parametrize("seed", range(24))
def test_random_mixtures(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forms = ("F32", "BF16", "F16", "Q4_0", "Q4_1", "Q8_0", "Q5_1")
    up, down = (str(rng.choice(forms)) for _ in range(2))
    unit = lambda form: 1 if form in abi.FLOAT_LAYOUTS else 32  # noqa: E731
    experts = int(rng.integers(1, 65))
    shape = Shape(
        experts,
        int(rng.integers(1, min(8, experts) + 1)),
        int(rng.integers(1, 100 // unit(up))) * unit(up),
        int(rng.integers(1, 130 // unit(down))) * unit(down),
        up,
        down,
        bool(rng.integers(2)),
        bool(rng.integers(4)),
    )
    mixture = Mixture(shape, seed)
    for _ in range(3):
        mixture.check(*operands(shape, int(rng.integers(1, 71)), int(rng.integers(1 << 30))))


@every_shape
def test_a_token_gives_the_same_bits_in_every_batch_and_with_every_number_of_threads(shape: Shape) -> None:
    mixture = Mixture(shape)
    x, ids, weights = operands(shape, 70)
    ids[3:9] = ids[3]  # some that agree
    library = native.native_library()
    try:
        library.set_threads(1)
        whole = mixture.run(x, ids, weights)
        for threads in (1, 2, 3, 8):
            library.set_threads(threads)
            assert np.array_equal(mixture.run(x, ids, weights), whole)
            for start, stop in ((0, 1), (3, 5), (3, 9), (17, 30), (5, 70)):
                assert np.array_equal(
                    mixture.run(x[start:stop], ids[start:stop], weights[start:stop]), whole[start:stop]
                )
            order = np.random.default_rng(1).permutation(70)
            assert np.array_equal(mixture.run(x[order], ids[order], weights[order]), whole[order])
    finally:
        library.set_threads(0)


def test_nan_of_a_token_stays_with_it() -> None:
    for shape in (SHAPES[1], SHAPES[5]):
        mixture = Mixture(shape)
        x, ids, weights = operands(shape, 8)
        x[2, 1] = np.nan
        weights[5, 0] = np.nan
        out = mixture.run(x, ids, weights)
        assert np.isnan(out[[2, 5]]).all() and np.isfinite(np.delete(out, [2, 5], 0)).all()


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range_is_refused_before_anything_is_read(bad: int) -> None:
    mixture = Mixture(SHAPES[1])
    x, ids, weights = operands(SHAPES[1], 6)
    ids[4, 1] = bad
    with pytest.raises(ValueError, match=f"row 4 chooses expert {bad} of 4"):
        mixture.run(x, ids, weights)
    ids[4, 1] = 0
    mixture.check(x, ids, weights)


def spoilt(change, shape: Shape = SHAPES[5]) -> str:
    """What the library says of a mixture that was changed before the plan was made."""

    class Spoilt(Mixture):
        def __init__(self) -> None:
            create, Builder.create = Builder.create, lambda b: (change(self), create(b))[1]
            try:
                super().__init__(shape)
            finally:
                Builder.create = create

    with pytest.raises(ValueError) as error:
        Spoilt()
    return str(error.value)


def test_what_does_not_hold_together_is_refused() -> None:
    def op(**fields):
        def change(m: Mixture) -> None:
            for name, (at, value) in fields.items():
                getattr(m.builder.ops[-1], name)[at] = value

        return change

    def buffer(which: str, **fields):
        def change(m: Mixture) -> None:
            for name, value in fields.items():
                setattr(m.builder.buffers[getattr(m, which)], name, value)

        return change

    assert "1025 experts" in spoilt(op(i=(1, 1025)))
    assert "stacks of" in spoilt(op(i=(1, 7)))
    assert "stacks of" in spoilt(op(i=(2, 0)))
    assert "activation 9" in spoilt(op(i=(0, 9)))
    assert "no matrix" in spoilt(op(w=(2, -1)))
    assert "no output" in spoilt(op(outputs=(1, -1)))
    assert "no input" in spoilt(op(inputs=(2, -1)))
    assert "kind" in spoilt(buffer("ids", kind=abi.KIND_F32))
    assert "wide" in spoilt(buffer("weights", width=1))
    assert "no slots" in spoilt(buffer("hidden", row_bytes=2 * 192 + 64))
    # The last slot of the last row ends in padding.
    assert "beyond the arena" in spoilt(
        lambda m: setattr(m.builder, "arena_bytes", m.builder.arena_bytes - 1), SHAPES[1]
    )
    # The results begin in the last slot of the hidden numbers, a row of which has two of 64 bytes.
    assert "between the slots" in spoilt(
        lambda m: setattr(m.builder.buffers[m.results], "offset", m.builder.buffers[m.results].offset - 64),
        Shape(2, 2, 16, 1),
    )
    assert "share memory" in spoilt(lambda m: setattr(m.builder.buffers[m.results], "offset", 0))


def test_every_instruction_set(tmp_path) -> None:
    """A plan takes one set per process: the checks above again, in processes of their own."""
    code = (
        "from tests.kernels.test_experts import *\n"
        "for shape in SHAPES:\n"
        "    mixture = Mixture(shape)\n"
        "    for tokens in (1, 3, 31):\n"
        "        mixture.check(*operands(shape, tokens, seed=tokens))\n"
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
