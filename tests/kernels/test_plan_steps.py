"""Greedy steps in a row inside the library: the same bits as one by one, and when they end."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest

from plait.kernels import native
from tests.kernels.test_plan_runtime import SAMPLED, Toy
from tests.kernels.toy_plan import Steps, functions, last_error

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")

OWNERS, LENGTHS = [0, 3], [7, 12]
FOREVER = 1e9


class Run:
    """Two sequences with a prompt behind them, about to decode. ids, values: what the last call brought."""

    def __init__(self, host: bool = False) -> None:
        self.toy = Toy(quantised=True, host=host)
        rng = np.random.default_rng(4)
        if not host:
            prompt = self.toy.step(rng.integers(0, SAMPLED, 19).tolist(), [0, 7, 19], LENGTHS, OWNERS, [6, 18])
            self.toy.plan.run(prompt)
        self.first = rng.integers(0, SAMPLED, 2).tolist()

    def step(self, ids: list[int], done: int = 0, **more: Any) -> Steps:
        more = {"want_logits": False, "want_hidden": False, **more}
        step = self.toy.step(ids, [0, 1, 2], [length + 1 + done for length in LENGTHS], OWNERS, [0, 1], **more)
        step.struct.positions = None
        return step

    def call(
        self,
        step: Steps | None = None,
        steps: int = 9,
        seconds: float = FOREVER,
        stop_ids: tuple[int, ...] = (),
        interrupt: ctypes.c_int32 | None = None,
    ) -> int:
        stops = np.array(stop_ids, np.int32)
        self.ids = np.full((max(steps, 1), 2), -7, np.int32)
        self.values = np.full((max(steps, 1), 2), np.nan, np.float32)
        step = step or self.step(self.first)
        return functions().plait_plan_run_steps(
            self.toy.plan.handle,
            ctypes.byref(step.struct),
            steps,
            seconds,
            stops.ctypes.data if len(stops) else None,
            len(stops),
            None if interrupt is None else ctypes.addressof(interrupt),
            self.ids.ctypes.data,
            self.values.ctypes.data,
        )

    def one_by_one(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        ids, found, values = self.first, [], []
        for done in range(steps):
            step = self.step(ids, done)
            self.toy.plan.run(step)
            ids = step.best_ids.tolist()
            found.append(ids)
            values.append(step.best_values.copy())
        return np.array(found), np.array(values)


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


def test_steps_in_a_row_are_those_one_by_one(run: Run) -> None:
    expected_ids, expected_values = run.one_by_one(9)
    step = run.step(run.first)
    before = {name: array.copy() for name, array in step.arrays.items()}
    assert run.call(step) == 9
    assert np.array_equal(run.ids, expected_ids) and np.array_equal(run.values, expected_values)
    assert len(np.unique(run.ids)) > 4, "steps that all find the same prove nothing"
    for name, array in step.arrays.items():  # the caller's, best ids and values too
        assert np.array_equal(array, before[name], equal_nan=True), name


def test_the_end_by_an_id_by_time_and_by_an_interrupt(run: Run) -> None:
    ids, _ = run.one_by_one(9)
    stop = int(ids[4, 1])
    first = int(np.flatnonzero((ids == stop).any(axis=1))[0])
    assert run.call(stop_ids=tuple(sorted({stop, SAMPLED + 1}))) == first + 1 < 9
    assert np.array_equal(run.ids[: first + 1], ids[: first + 1]) and (run.ids[first + 1 :] == -7).all()
    absent = tuple(i for i in range(SAMPLED) if i not in ids)
    assert run.call(stop_ids=absent) == 9
    assert run.call(seconds=0.0) == 1
    assert run.call(interrupt=ctypes.c_int32(1)) == 1
    assert run.call(interrupt=ctypes.c_int32(0)) == 9


def test_copies_are_made_once(run: Run) -> None:
    """Sequence 0's first block, moved: a copy made again before the second step would undo what the first one wrote."""
    ids, values = run.one_by_one(9)
    step = run.step(run.first, pairs=[(1, 30)])
    step.block_table[0, 0, 0] = 30
    assert run.call(step) == 9
    assert np.array_equal(run.ids, ids) and np.array_equal(run.values, values)


def test_an_interrupt_from_another_thread_while_it_runs(run: Run) -> None:
    """The call lets other threads of Python run, and sees the flag at the next step."""
    flag = ctypes.c_int32(0)

    def interrupt() -> None:
        flag.value = 1

    # The steps of the toy end with its blocks: what can be told is that a flag set before the call's end counts.
    timer = threading.Timer(0.0, interrupt)
    timer.start()
    deadline = time.monotonic() + 10
    while run.call(steps=16, interrupt=flag) == 16:
        assert time.monotonic() < deadline
    timer.join()
    assert run.call(steps=16, interrupt=flag) == 1


def test_a_value_that_is_not_finite_is_the_last(run: Run) -> None:
    ids, _ = run.one_by_one(9)
    kept = run.toy.pool.copy()
    row = int(ids[2, 0])
    first = int(np.flatnonzero((ids == row).any(axis=1))[0])
    data = np.ctypeslib.as_array(
        ctypes.cast(run.toy.builder.matrices[0].data, ctypes.POINTER(ctypes.c_uint8)),
        (run.toy.builder.matrices[0].panel_bytes * 7,),
    )
    before = data.copy()
    panel = data[row // 16 * run.toy.builder.matrices[0].panel_bytes :][: run.toy.builder.matrices[0].panel_bytes]
    scales = panel[:32].view(np.float16)  # Q8_0: the scale of the first block of each of the 16 rows
    try:
        scales[row % 16] = np.nan
        done = run.call()
    finally:
        data[:] = before
        run.toy.pool[:] = kept
    assert done == first + 2 < 9
    assert np.array_equal(run.ids[: first + 1], ids[: first + 1])
    assert np.isfinite(run.values[: first + 1]).all() and not np.isfinite(run.values[first + 1]).all()


def _with(**changes: Any):
    def change(run: Run) -> int:
        step = run.step(run.first)
        for name, value in changes.items():
            setattr(step.struct, name, value)
        return run.call(step)

    return change


def _wants_positions(run: Run) -> int:
    step = run.step(run.first)
    step.struct.positions = step.positions.ctypes.data
    return run.call(step)


def _two_tokens(run: Run) -> int:
    step = run.toy.step([1, 2, 3], [0, 2, 3], [9, 13], OWNERS, [1, 2], want_logits=False, want_hidden=False)
    step.struct.positions = None
    return run.call(step)


def _rows_crossed(run: Run) -> int:
    step = run.step(run.first)
    step.logit_rows[:] = [1, 0]
    return run.call(step)


def _blocks_missing(run: Run) -> int:
    step = run.step(run.first)
    step.block_table[0, 1, 2:] = 0  # sequence 1 has twelve tokens, and room for sixteen
    return run.call(step)


def _short_context(run: Run) -> int:
    step = run.step(run.first)
    step.context_len[:] = 0
    return run.call(step)


def _no_room_for_results(run: Run) -> int:
    step = run.step(run.first)
    return functions().plait_plan_run_steps(
        run.toy.plan.handle, ctypes.byref(step.struct), 2, 1.0, None, 0, None, None, None
    )


WRONG = {
    "no steps": (lambda run: run.call(steps=0), "0 steps"),
    "ids that do not ascend": (lambda run: run.call(stop_ids=(5, 3)), "ascend"),
    "logits": (lambda run: run.call(run.step(run.first, want_logits=True)), "neither logits nor hidden"),
    "hidden states": (lambda run: run.call(run.step(run.first, want_hidden=True)), "neither logits nor hidden"),
    "positions": (_wants_positions, "no positions"),
    "a prompt": (_two_tokens, "one token"),
    "fewer rows": (_with(num_rows=1), "one token"),
    "nobody": (_with(num_tokens=0, num_sequences=0, num_rows=0), "one token"),
    "rows of others": (_rows_crossed, "row 0 is of token 1"),
    "blocks of the first steps only": (_blocks_missing, "without a block"),
    "a context below its tokens": (_short_context, "context"),
    "a token outside of the vocabulary": (lambda run: run.call(run.step([10_000, 1])), "token id 10000"),
    "nowhere to put them": (_no_room_for_results, "nowhere"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments_are_refused_in_words(run: Run, name: str) -> None:
    call, words = WRONG[name]
    assert call(run) == -1
    assert words in last_error()


def test_a_plan_with_a_host_operation_is_refused() -> None:
    assert Run(host=True).call() == -1
    assert "operation of the caller" in last_error()
