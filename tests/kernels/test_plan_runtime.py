"""The plan runtime: every value of a step against float64, whatever the batch, the threads and the instruction set.

Each operation is judged by itself: its outputs against a numpy reference of its own inputs as the plan left them.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest

from plait.kernels import abi, native
from tests.kernels import quant_model
from tests.kernels.quant_model import isa_names
from tests.kernels.toy_plan import LOGITS, Builder, Plan, Steps, functions

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")

D, HEADS, KV_HEADS, WIDTH, F, V, SAMPLED = 64, 4, 2, 32, 160, 107, 99
BLOCK = 8
MAX_TOKENS, MAX_ROWS, NUM_BLOCKS = 80, 8, 40
EPS, SCALE, CAP = 1e-5, 0.2, 5.0


class Toy:
    """One layer of a decoder and its head as a plan; `quantised` weights or float ones; `host`: one host operation.

    apart: what keeps the rotations from being done by attention, one of APART; None: nothing.
    """

    def __init__(
        self,
        quantised: bool,
        host: bool = False,
        sampled: int = SAMPLED,
        cap: float = CAP,
        apart: str | None = None,
    ) -> None:
        rng = np.random.default_rng(5)
        b = self.builder = Builder(MAX_TOKENS, MAX_ROWS, V, sampled)
        self.quantised, self.cap = quantised, cap
        layout = (lambda name: name) if quantised else (lambda name: "F32")
        b.tables = (1.0 / 100 ** (np.arange(WIDTH // 2) / 16)).astype(np.float32)
        block_numbers = BLOCK * KV_HEADS * 2 * WIDTH
        self.pool = np.zeros((2, NUM_BLOCKS, block_numbers), np.float32)  # the second slot is there to be copied
        b.caches.append(
            abi.Cache(self.pool[0].ctypes.data, 4 * block_numbers, 0, BLOCK, KV_HEADS, WIDTH, WIDTH, 0, 0, 0)
        )
        b.spec.pool, b.spec.copy_slots = self.pool.ctypes.data, 2
        b.spec.slot_stride, b.spec.block_bytes = self.pool[0].nbytes, 4 * block_numbers
        self.norm_w, self.bias = (rng.standard_normal(n).astype(np.float32) for n in (D, F))
        kind = abi.KIND_Q8 if quantised else abi.KIND_F32
        embed, head = b.matrix(rng, V, D, layout("Q8_0")), b.matrix(rng, V, D, "F32")
        q, k, v = (b.matrix(rng, n * WIDTH, D, layout("Q4_0")) for n in (HEADS, KV_HEADS, KV_HEADS))
        o, gate, up = (
            b.matrix(rng, D, HEADS * WIDTH, layout("Q8_0")),
            *(b.matrix(rng, F, D, layout("Q4_1")) for _ in "gu"),
        )
        down = b.matrix(rng, D, F, layout("Q5_0"))
        norm, bias = b.vector(self.norm_w), b.vector(self.bias)
        self.x, self.angles, self.n1 = b.buffer(D), b.buffer(WIDTH), b.buffer(D)
        self.a1 = b.buffer(D, kind=kind) if quantised else self.n1
        self.q, self.k, self.v = (b.buffer(n * WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.qr, self.kr = b.buffer(HEADS * WIDTH), b.buffer(KV_HEADS * WIDTH)
        self.attended, self.x2, self.n2 = b.buffer(HEADS * WIDTH, kind=kind), b.buffer(D), b.buffer(D)
        self.a2 = b.buffer(D, kind=kind) if quantised else self.n2
        self.g, self.x3, self.last = b.buffer(F, kind=kind), b.buffer(D), b.buffer(D)
        self.rows = b.buffer(D, LOGITS)
        b.op("embed", outputs=self.x, w=embed, f=(2.0,))
        b.op("positions", outputs=self.angles, i=(0, WIDTH // 2), f=(1.0,))
        b.op("rms_norm", self.x, self.n1, norm, (1, D, 0), (EPS,))
        if quantised:
            b.op("quantise", self.n1, self.a1)
        b.op("linear", self.a1, [self.q, self.k, self.v], [q, -1, k, -1, v, -1], (3,))
        b.op("rotate", [self.q, self.angles], self.qr, (), (HEADS, WIDTH, WIDTH, 0))
        b.op("rotate", [self.k, self.angles], self.kr, (), (KV_HEADS, WIDTH, WIDTH, 0))
        self.values = self.kr if apart == "values too" else self.v
        b.op("write_kv", [self.kr, self.values])
        b.op("attend", self.qr, self.attended, (), (0, HEADS, 0), (SCALE, 0.0))
        self.apart = apart is not None  # whether the rotations have to be a stage of their own
        if apart == "read again":
            b.op("copy", self.kr, b.buffer(KV_HEADS * WIDTH))
        elif apart == "read in part":
            self.part = b.part(self.kr, WIDTH, WIDTH)
            b.op("copy", self.part, b.buffer(WIDTH))
        elif apart == "written over":
            b.buffers[self.v].offset = b.buffers[self.attended].offset
        b.op("linear", [self.attended, self.x], self.x2, [o, -1], (1,))
        self.host_op = len(b.ops)
        if host:
            b.op("host", [self.x2, self.n1, self.attended] if apart == "read by the caller" else ())
        b.op("rms_norm", self.x2, self.n2, norm, (1, D, 0), (EPS,))
        if quantised:
            b.op("quantise", self.n2, self.a2)
        b.op("gated", self.a2, self.g, [gate, bias, up, -1], (abi.ACTIVATIONS["silu"],))
        b.op("linear", [self.g, self.x2], self.x3, [down, -1], (1,))
        b.op("rms_norm", self.x3, self.last, norm, (1, D, 0), (EPS,))
        b.op("hidden", self.last)
        b.op("select_rows", self.last, self.rows)
        b.op("logits", self.rows, (), head, (), (cap,))
        names = ("embed", "head", "q", "k", "v", "o", "gate", "up", "down")
        numbers = (embed, head, q, k, v, o, gate, up, down)
        self.weights = {name: b.values[n].astype(np.float64) for name, n in zip(names, numbers, strict=True)}
        self.plan: Plan = b.create()
        self.history: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def step(self, ids: list[int], start: list[int], context: list[int], owners: list[int], rows: list[int], **more):
        """A step of sequences `owners`; sequence i has the blocks 1 + 4 i .. 4 + 4 i."""
        table = np.array([[[1 + 4 * owner + j for j in range(4)] for owner in owners]])
        return Steps(ids, start, context, table, rows, V, D, **more)

    def check(self, step: Steps, owners: list[int]) -> None:
        """Every buffer of the step that just ran, and its outputs, against float64."""
        w, n = self.weights, len(step.ids)
        get = lambda buffer: self.plan.rows(buffer, n).astype(np.float64)  # noqa: E731
        near(get(self.x), 2.0 * w["embed"][step.ids])
        angle = step.positions[:, None] * self.builder.tables.astype(np.float64)
        near(get(self.angles), np.concatenate([np.cos(angle), np.sin(angle)], 1), 1e-5)
        near(get(self.n1), norm(get(self.x), self.norm_w))
        if self.quantised:
            near_record(get(self.a1), get(self.n1))
        for out, name in ((self.q, "q"), (self.k, "k"), (self.v, "v")):
            near(get(out), get(self.a1) @ w[name].T)
        turned = [rotate(get(source), get(self.angles)) for source in (self.q, self.k)]
        if n != len(owners) or self.apart:  # else attention turns them itself, head by head, and writes them nowhere
            for out, expected in zip((self.qr, self.kr), turned, strict=True):
                near(get(out), expected)
        expected = self.attend(step, owners, *turned, turned[1] if self.values == self.kr else get(self.v))
        (near_record if self.quantised else near)(get(self.attended), expected)
        near(get(self.x2), get(self.attended) @ w["o"].T + get(self.x))
        near(get(self.n2), norm(get(self.x2), self.norm_w))
        if self.quantised:
            near_record(get(self.a2), get(self.n2))
        gate = get(self.a2) @ w["gate"].T + self.bias
        expected = gate / (1 + np.exp(-gate)) * (get(self.a2) @ w["up"].T)
        (near_record if self.quantised else near)(get(self.g), expected)
        near(get(self.x3), get(self.g) @ w["down"].T + get(self.x2))
        near(get(self.last), norm(get(self.x3), self.norm_w))
        if step.want_hidden:
            assert np.array_equal(step.hidden, self.plan.rows(self.last, n))
        logits = get(self.last)[step.rows] @ w["head"].T
        if self.cap:
            logits = self.cap * np.tanh(logits / self.cap)
        if step.want_logits:
            near(step.logits, logits)
            assert np.array_equal(step.best_ids, step.logits[:, :SAMPLED].argmax(1))
            assert np.array_equal(step.best_values, step.logits[:, :SAMPLED].max(1))
        near(step.best_values, logits[:, :SAMPLED].max(1, initial=-np.inf))

    def attend(self, step: Steps, owners: list[int], q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out = np.zeros_like(q)
        for s, owner in enumerate(owners):
            past = self.history.setdefault(owner, [])
            for t in range(step.query_start[s], step.query_start[s + 1]):
                past.append((k[t].reshape(KV_HEADS, WIDTH), v[t].reshape(KV_HEADS, WIDTH)))
                keys, values = (np.stack([pair[i] for pair in past]) for i in (0, 1))
                for head in range(HEADS):
                    kv = head * KV_HEADS // HEADS
                    scores = SCALE * keys[:, kv] @ q[t].reshape(HEADS, WIDTH)[head]
                    p = np.exp(scores - scores.max())
                    out[t, head * WIDTH : (head + 1) * WIDTH] = (p / p.sum()) @ values[:, kv]
        return out


def near(got: np.ndarray, expected: np.ndarray, rel: float = 2e-5) -> None:
    """Equal to `rel` of the largest magnitude of the row's kind."""
    assert got.shape == expected.shape
    if got.size:
        assert np.max(np.abs(got - expected)) <= rel * max(1e-6, np.abs(expected).max())


def near_record(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal to half a step of the record's scale in each block of 32, and a rounding."""
    step = np.abs(expected.reshape(len(expected), -1, 32)).max(2) / 127
    assert np.all(np.abs(got - expected).reshape(*step.shape, 32) <= 0.502 * step[..., None] + 1e-6)


def norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * w


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    half = WIDTH // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    x = x.reshape(len(x), -1, WIDTH)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], 2).reshape(len(x), -1)


def run_steps(toy: Toy, check: bool = True, want_logits: bool = True) -> list[Steps]:
    """Prefill of two sequences, then decoding beside a third's prefill, a long one, and one token alone."""
    rng = np.random.default_rng(1)
    ids = lambda n: rng.integers(0, V, n).tolist()  # noqa: E731
    steps = [
        (toy.step(ids(19), [0, 7, 19], [7, 12], [0, 1], [6, 18], want_logits=want_logits), [0, 1]),
        (toy.step(ids(9), [0, 1, 6, 9], [8, 17, 3], [0, 1, 2], [0, 5, 8], want_logits=want_logits), [0, 1, 2]),
        (toy.step(ids(64), [0, 30, 62, 64], [30, 32, 19], [3, 4, 1], [63], want_logits=want_logits), [3, 4, 1]),
        (toy.step(ids(1), [0, 1], [9], [0], [0], want_logits=want_logits), [0]),
        (toy.step(ids(7), [0, 7], [10], [2], [], want_logits=want_logits), [2]),
    ]
    for step, owners in steps:
        assert toy.plan.run(step) == len(toy.builder.ops)
        if check:
            toy.check(step, owners)
    return [step for step, _ in steps]


@pytest.fixture
def threads():
    """Sets the number of threads; afterwards there are as many as before."""
    before = functions().plait_threads()
    yield lambda count: functions().plait_set_threads(count)
    functions().plait_set_threads(before)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("quantised", [False, True], ids=["floats", "quantised"])
def test_every_value_of_mixed_steps(monkeypatch, isa, quantised):
    monkeypatch.setenv("PLAIT_ISA", isa)
    run_steps(Toy(quantised))


# Others read the turned keys, or a part of them; they are the values as well; or attention writes where the values lie
# that it would still have to store.
APART = ["read again", "read in part", "values too", "written over"]


@pytest.mark.parametrize("apart", APART)
def test_rotations_that_attention_cannot_do_itself(threads, apart):
    threads(2)
    toy = Toy(False, apart=apart)
    steps = run_steps(toy, check=apart != "written over")
    if apart != "values too":  # which are other values
        assert outputs(steps) == outputs(run_steps(Toy(False), check=False))


def test_rotations_that_the_caller_may_read():
    """A host operation names no more than three of its operands: the turned keys may be the fourth."""
    toy = Toy(False, host=True, apart="read by the caller")
    step = toy.step([3], [0, 1], [1], [0], [0])
    assert toy.plan.run(step) == toy.host_op
    assert toy.plan.run(step, toy.host_op + 1) == len(toy.builder.ops)
    toy.check(step, [0])


def outputs(steps: list[Steps]) -> list[bytes]:
    return [step.arrays[name].tobytes() for step in steps for name in ("logits", "best_ids", "best_values", "hidden")]


@pytest.mark.parametrize("quantised", [False, True], ids=["floats", "quantised"])
def test_the_bits_do_not_depend_on_the_number_of_threads(threads, quantised):
    seen = []
    for count in (1, 2, 3):
        threads(count)
        toy = Toy(quantised)
        seen.append(outputs(run_steps(toy, check=False)) + [toy.pool.tobytes()])
    assert seen[0] == seen[1] == seen[2]


def test_the_bits_of_a_sequence_do_not_depend_on_what_else_is_in_the_batch():
    ids = np.random.default_rng(2).integers(0, V, 40).tolist()
    alone = Toy(True)
    step = alone.step(ids[:20], [0, 20], [20], [0], [19])
    alone.plan.run(step)
    beside = Toy(True)
    mixed = beside.step(ids[20:] + ids[:20], [0, 5, 20, 40], [5, 15, 20], [1, 2, 0], [39, 4])
    beside.plan.run(mixed)
    assert np.array_equal(mixed.logits[0], step.logits[0])
    assert np.array_equal(mixed.hidden[20:], step.hidden)
    tokens = Toy(True)
    for t in range(20):
        single = tokens.step(ids[t : t + 1], [0, 1], [t + 1], [0], [0])
        tokens.plan.run(single)
    assert np.array_equal(single.logits[0], step.logits[0])


def test_best_ids_without_logits():
    with_logits, without = run_steps(Toy(True), check=False), run_steps(Toy(True), want_logits=False)
    for a, b in zip(with_logits, without, strict=True):
        assert np.array_equal(a.best_ids, b.best_ids) and np.array_equal(a.best_values, b.best_values)
        assert np.isnan(b.logits).all()


def test_a_host_operation_is_left_to_the_caller():
    plain, host = Toy(False), Toy(False, host=True)
    step, same = (toy.step([3, 1, 4], [0, 3], [3], [0], [2]) for toy in (plain, host))
    plain.plan.run(step)
    assert host.plan.run(same) == host.host_op
    assert np.isnan(same.hidden).all()
    host.plan.rows(host.x2, 3)[:] *= 2.0  # what follows must see it
    assert host.plan.run(same, host.host_op + 1) == len(host.builder.ops)
    assert not np.array_equal(same.logits, step.logits)
    host.history.clear()
    assert host.plan.run(same) == host.host_op
    assert host.plan.run(same, host.host_op + 1) == len(host.builder.ops)
    assert np.array_equal(same.logits, step.logits)
    assert host.plan.run(same, len(host.builder.ops)) == len(host.builder.ops)


def test_copies_come_first_in_their_order_in_every_slot():
    toy = Toy(False)
    toy.pool[:] = np.arange(2 * NUM_BLOCKS).reshape(2, NUM_BLOCKS, 1)
    # 30 -> 31 before 32 -> 30, and 31 goes on to 33.
    step = toy.step([1], [0, 1], [1], [0], [0], pairs=[(30, 31), (32, 30), (31, 33)])
    toy.plan.run(step)
    assert (toy.pool[0, [30, 31, 32, 33]] == np.array([[32], [30], [32], [30]])).all()
    assert (toy.pool[1, [30, 31, 32, 33]] == np.array([[72], [70], [72], [70]])).all()


class Head:
    """SELECT_ROWS and LOGITS of a matrix over given rows, the rows being embeddings of the ids."""

    def __init__(self, head: np.ndarray, sampled: int, cap: float = 0.0) -> None:
        rng = np.random.default_rng(0)
        b = self.builder = Builder(16, 4, len(head), sampled)
        table, matrix = b.matrix(rng, 16, head.shape[1], "F32"), b.matrix(rng, *head.shape, "F32")
        packed = quant_model.pack(head, "F32", "F32", head.shape[1])
        b.keep.append(packed)
        b.matrices[matrix] = packed.matrix
        x, rows = b.buffer(head.shape[1]), b.buffer(head.shape[1], LOGITS)
        b.op("embed", outputs=x, w=table, f=(1.0,))
        b.op("select_rows", x, rows)
        b.op("logits", rows, (), matrix, (), (cap,))
        self.plan, self.vocab, self.width = b.create(), len(head), head.shape[1]
        self.embedded = b.values[table]

    def best(self, ids: list[int], want_logits: bool) -> Steps:
        step = Steps(
            ids,
            [0, len(ids)],
            [len(ids)],
            np.zeros((0, 1, 0)),
            list(range(len(ids))),
            self.vocab,
            self.width,
            want_logits=want_logits,
        )
        self.plan.run(step)
        return step


@pytest.mark.parametrize("want_logits", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_equal_logits_give_the_lowest_id_and_nan_shows(threads, count, want_logits):
    threads(count)
    head = np.zeros((1000, 32), np.float32)
    head[[700, 300, 900]] = 1.0  # equal: the lowest id wins where the sum is positive
    plan = Head(head, 1000)
    sums = plan.embedded.sum(1)
    positive, negative = int(sums.argmax()), int(sums.argmin())
    step = plan.best([positive, negative], want_logits)
    assert step.best_ids.tolist() == [300, 0] and step.best_values[1] == 0
    head[850, 3] = np.nan
    assert np.isnan(Head(head, 1000).best([positive], want_logits).best_values).all()
    # Columns beyond the sampled ones count for nothing.
    step = Head(head, 850).best([positive], want_logits)
    assert step.best_ids.tolist() == [300] and not np.isnan(step.best_values).any()
    assert Head(head, 300).best([positive], want_logits).best_ids.tolist() == [0]


def test_the_best_of_several_threads_is_the_lowest_id_again(threads):
    threads(2)
    head = np.zeros((20_000, 64), np.float32)
    head[::97] = 1.0
    plan = Head(head, 20_000)
    positive = int(plan.embedded.sum(1).argmax())
    head[0] = 0.0
    plan = Head(head, 20_000)
    assert {int(plan.best([positive], False).best_ids[0]) for _ in range(100)} == {97}


def test_two_callers_at_once(threads):
    threads(2)
    toys = [Toy(True) for _ in range(3)]
    expected = outputs(run_steps(Toy(True), check=False))
    wrong: list[int] = []

    def call(which: int) -> None:
        for _ in range(5):
            if outputs(run_steps(toys[which], check=False)) != expected:
                wrong.append(which)

    callers = [threading.Thread(target=call, args=(which,)) for which in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_forked_child_makes_threads_of_its_own():
    code = (
        "import os, sys\n"
        "from tests.kernels.test_plan_runtime import Toy, functions, outputs, run_steps\n"
        "functions().plait_set_threads(2)\n"
        "toy = Toy(True)\n"
        "expected = outputs(run_steps(toy, check=False))\n"
        "pid = os.fork()\n"
        "same = outputs(run_steps(toy, check=False)) == expected\n"
        "if pid == 0: os._exit(0 if same and len(os.listdir('/proc/self/task')) == 2 else 3)\n"
        "_, status = os.waitpid(pid, 0)\n"
        "sys.exit(1 if not same else os.waitstatus_to_exitcode(status))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_during_a_step_leaves_the_child_a_plan_that_runs():
    code = (
        "import os, sys, threading, time\n"
        "from tests.kernels.test_plan_runtime import Toy, functions\n"
        "functions().plait_set_threads(2)\n"
        "toy = Toy(False)\n"
        "step = lambda: toy.step([1] * 64, [0, 32, 64], [32, 32], [0, 1], [31, 63])\n"
        "mine, other = step(), step()\n"
        "stop = False\n"
        "def call():\n"
        "    while not stop: toy.plan.run(other)\n"
        "thread = threading.Thread(target=call)\n"
        "thread.start()\n"
        "for _ in range(20):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        toy.plan.run(mine)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "stop = True\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_a_plan_made_for_fewer_threads_than_there_are(threads):
    """Workers that are no longer wanted may be about to take an item: their memory is there."""
    for count in (8, 2, 7, 1, 3):
        threads(count)
        toy = Toy(True)
        first = outputs(run_steps(toy, check=False))
        assert outputs(run_steps(toy, check=False)) == first


def test_selected_rows_are_copied_without_what_lies_beside_them():
    """Buffers are columns of wider rows: what is between them stays."""
    rng = np.random.default_rng(0)
    b = Builder(4, 2, 16)
    table = b.matrix(rng, 8, 16, "F32")
    x, rows = b.buffer(16), b.buffer(16, LOGITS)
    b.buffers[x].row_bytes = b.buffers[rows].row_bytes = 256
    b.buffers[x].offset, b.buffers[rows].offset = 0, 1024
    b.arena_bytes = 1024 + 256 + 64  # the last row ends with its numbers
    guard = b.buffer(16, LOGITS)  # the columns right of the selected ones
    b.buffers[guard].offset, b.buffers[guard].row_bytes = 1024 + 64, 256
    b.arena_bytes = 1024 + 512
    b.op("embed", outputs=x, w=table, f=(1.0,))
    b.op("select_rows", x, rows)
    plan = b.create()
    plan.rows(guard, 2)[:] = 7.0
    plan.run(Steps([3, 5, 1], [0, 3], [3], np.zeros((0, 1, 0)), [2, 0], 16, 16))
    assert np.array_equal(plan.rows(rows, 2), b.values[table][[1, 3]])
    assert (plan.rows(guard, 2) == 7.0).all()


def test_profile_and_bytes():
    toy = Toy(False)
    seconds = np.zeros(len(toy.builder.ops))
    functions().plait_plan_profile(toy.plan.handle, 1, seconds.ctypes.data)
    run_steps(toy, check=False)
    functions().plait_plan_profile(toy.plan.handle, 0, seconds.ctypes.data)
    kinds = [op.kind for op in toy.builder.ops]
    assert (seconds >= 0).all() and seconds[kinds.index(abi.OP_KINDS["logits"])] > 0
    assert seconds[kinds.index(abi.OP_KINDS["positions"])] == 0  # counted with the stage's first operation
    run_steps(toy, check=False)
    functions().plait_plan_profile(toy.plan.handle, 0, seconds.ctypes.data)
    assert not seconds.any()
    assert functions().plait_plan_bytes(toy.plan.handle) >= toy.builder.arena_bytes


def change(what: str, index: int, **fields):
    def apply(builder: Builder) -> None:
        for name, value in fields.items():
            thing = getattr(builder, what)[index]
            if isinstance(value, dict):
                for position, number in value.items():
                    getattr(thing, name)[position] = number
            else:
                setattr(thing, name, value)

    return apply


def spec(**fields):
    def apply(builder: Builder) -> None:
        for name, value in fields.items():
            setattr(builder.spec, name, value)

    return apply


def shifted(builder: Builder) -> None:
    """A norm whose output lies 64 bytes behind its input, in rows with room for both."""
    x, y = builder.buffers[0], builder.buffers[2]
    x.row_bytes = y.row_bytes = 512
    x.offset, y.offset = builder.arena_bytes, builder.arena_bytes + 64
    builder.arena_bytes += 512 * (MAX_TOKENS + 1)


def quantised_in_place(builder: Builder) -> None:
    """A record in its numbers' place, in rows with room for either."""
    record = builder.buffer(D, kind=abi.KIND_Q8)
    x = builder.buffers[0]
    builder.buffers[record].offset, builder.buffers[record].row_bytes = x.offset, x.row_bytes
    builder.op("quantise", 0, record)


# Operations of the float toy: 0 embed, 1 positions, 2 rms_norm, 3 linear, 4 and 5 rotate, 6 write_kv, 7 attend,
# 8 linear, 9 rms_norm, 10 gated, 11 linear, 12 rms_norm, 13 hidden, 14 select_rows, 15 logits.
BROKEN = {
    "unknown kind": (change("ops", 0, kind=99), "operation 0: unknown kind 99"),
    "no such buffer": (change("ops", 2, inputs={0: 55}), "operation 2 .rms_norm.: no buffer 55"),
    "no such matrix": (change("ops", 2, w={0: 55}), "no matrix 55"),
    "no input": (change("ops", 2, inputs={0: -1}), "no input"),
    "no output": (change("ops", 2, outputs={0: -1}), "no output"),
    "embedding without a matrix": (change("ops", 0, w={0: -1}), "operation 0 .embed.: no matrix"),
    "frequencies beyond the table": (change("ops", 1, i={0: 1}), "frequencies 1 . 16 of a table of 16"),
    "norm of another width": (change("ops", 2, i={1: 32}), "no vector of 32"),
    "group of four": (change("ops", 3, i={0: 4}), "a group of 4"),
    "product in the wrong width": (change("ops", 3, w={0: 5}), "is 64 wide"),
    "rotation of an odd width": (change("ops", 4, i={2: 31}), "31 of a width of 32"),
    "no such cache": (change("ops", 6, i={0: 1}), "no cache 1"),
    "heads that do not divide": (change("ops", 7, i={1: 3}), "3 heads over 2"),
    "unknown activation": (change("ops", 10, i={0: 17}), "activation 17"),
    "add of another width": (change("ops", 8, inputs={1: 1}), "buffer 1. is 32 wide"),
    "output over the input": (change("ops", 8, outputs={0: 8}, inputs={1: -1}), "is 128 wide|share memory"),
    "logits from token rows": (change("ops", 15, inputs={0: 0}), "wrong kind of rows"),
    "buffer beyond the arena": (change("buffers", 3, offset=1 << 40), "buffer 3.*inside the arena"),
    "buffer off its boundary": (change("buffers", 3, offset=4), "buffer 3.*inside the arena"),
    "rows too short": (change("buffers", 0, row_bytes=64), "buffer 0: rows of 64 bytes"),
    "negative width": (change("buffers", 0, width=-64), "buffer 0: width -64"),
    "unknown kind of buffer": (change("buffers", 0, kind=9), "buffer 0: kind 9"),
    "values that overlap in a stage": (change("buffers", 1, offset=128), "row by row, but buffers 0 and 1 share"),
    "values in a place that is shifted": (shifted, "buffer .* and input .buffer 0. overlap"),
    "quantised in place": (quantised_in_place, "operation 16 .quantise.: output .buffer .* share memory"),
    "angles written over": (change("ops", 4, outputs={0: 1}, i={0: 1}, inputs={0: 1}), "angles .buffer 1. are written"),
    "matrix without data": (change("matrices", 1, data=None), "matrix 1: no data"),
    "matrix of an unknown layout": (change("matrices", 1, layout=33), "matrix 1: layout 33"),
    "panels of the wrong size": (change("matrices", 1, panel_bytes=1), "matrix 1: panels of 1 bytes"),
    "cache without memory": (change("caches", 0, base=None), "cache 0: no memory"),
    "blocks that are too small": (change("caches", 0, block_stride=64), "cache 0: blocks of 64 bytes"),
    "blocks of 7 tokens": (change("caches", 0, block_tokens=7), "cache 0: blocks of 7"),
    "sampling beyond the vocabulary": (spec(sampled_ids=V + 1), f"{V + 1} of {V} columns"),
    "another vocabulary": (spec(vocab_size=V + 1), f"the head has {V} rows"),
    "no tokens": (spec(max_tokens=0), "max_tokens 0"),
    "copies without a pool": (spec(pool=None), "copies over 2 slots need a pool"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_specification_that_does_not_hold_together_is_refused_in_words(name):
    toy = Toy(False)
    breaks, words = BROKEN[name]
    breaks(toy.builder)
    with pytest.raises(ValueError, match=words):
        toy.builder.create()


BAD_STEPS = {
    "too many tokens": (lambda s: setattr(s.struct, "num_tokens", 81), "a step of 81 tokens, the plan takes 80"),
    "too many rows": (lambda s: setattr(s.struct, "num_rows", 9), "logits of 9 rows"),
    "an id beyond the table": (lambda s: s.token_ids.__setitem__(1, V), f"token id {V} of {V}"),
    "a row beyond the tokens": (lambda s: s.logit_rows.__setitem__(0, 5), "logits of row 5 of 3"),
    "tokens of nobody": (lambda s: s.query_start.__setitem__(1, 2), "do not cover"),
    "a context shorter than its tokens": (lambda s: s.context_len.__setitem__(0, 2), "3 tokens in a context of 2"),
    "a table that is too narrow": (lambda s: s.context_len.__setitem__(0, 33), "33 tokens need 5 blocks"),
    "a block beyond the pool": (lambda s: s.block_table.__setitem__((0, 0, 0), NUM_BLOCKS), f"block {NUM_BLOCKS} of"),
    "the null block": (lambda s: s.block_table.__setitem__((0, 0, 0), 0), "without a block"),
    "no table for the group": (lambda s: setattr(s.struct, "num_groups", 0), "none for group 0"),
    "a copy beyond the pool": (lambda s: s.copies.__setitem__((0, 1), -1), "a copy of block -1"),
    "nowhere for the best": (lambda s: setattr(s.struct, "best_ids", None), "nowhere to put"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_step_that_does_not_hold_together_is_refused_in_words(name):
    toy = Toy(False)
    step = toy.step([3, 1, 4], [0, 3], [3], [0], [2], pairs=[(5, 6)])
    breaks, words = BAD_STEPS[name]
    breaks(step)
    with pytest.raises(ValueError, match=words):
        toy.plan.run(step)


def test_a_run_from_the_middle_of_a_stage_is_refused():
    toy = Toy(False)
    with pytest.raises(ValueError, match="cannot be run from operation 1"):
        toy.plan.run(toy.step([3], [0, 1], [1], [0], [0]), 1)
    assert functions().plait_plan_buffer(toy.plan.handle, 999) is None


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("PLAIT_ISA", "sse17")
    with pytest.raises(ValueError, match="PLAIT_ISA"):
        Toy(False)
    assert functions().plait_isa() is None
    assert ctypes.sizeof(abi.Op) == 96
