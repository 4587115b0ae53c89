"""Greedy steps in a row on the native plan, and the engine that runs ahead on it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from plait.engine.engine import Engine
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from plait.errors import EngineError, UsageError
from plait.kernels.native import native_library, reason
from plait.memory.layout import make_layout
from plait.model.record import record
from plait.ops.recording import Recording
from plait.ops.step import StepInputs
from plait.plan.executor import MAX_STEPS, NativeExecutor
from plait.weights.pack import pack_decoder
from tests.plan.models import ALL, layout_of, make
from tests.plan.steps import Script
from tests.plan.test_native_executor import planted, value_of
from tests.threads import one_thread

__all__ = ["one_thread"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}"),
]
FOREVER = 60.0  # seconds
NONE = np.array([], np.int32)


@cache
def recorded(name: str) -> tuple[Any, Any, Recording]:
    decoder = make(ALL[name])
    return decoder, pack_decoder(decoder), record(decoder)


class Decoding:
    """Three sequences with prompts behind them. first: the token that each decodes next."""

    def __init__(self, name: str) -> None:
        decoder, store, recording = recorded(name)
        layout = layout_of(decoder, 4)
        self.script = Script(layout, decoder.config.vocab_size, count=3, tokens=80)
        self.executor = NativeExecutor(recording, store, layout, self.script.num_blocks, 64, kv_dtype="fp32")
        ids, inputs = self.script.step([(0, 3), (1, 17), (2, 30)])
        self.executor.execute(ids, inputs)
        self.first, self.inputs = self.script.step([(0, 1), (1, 1), (2, 1)])

    def call(self, steps: int = 20, seconds: float = FOREVER, stop_ids: np.ndarray = NONE):
        return self.executor.execute_steps(self.first, self.inputs, steps, seconds, stop_ids)

    def one_by_one(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        ids, found, values = self.first, [], []
        for done in range(steps):
            s = self.inputs.sequences
            sequences = type(s)(s.query_start, s.context_len + np.int32(done), s.block_table)
            result = self.executor.execute(
                ids, StepInputs(sequences=sequences, logit_rows=self.inputs.logit_rows), logits=False
            )
            ids = result.best_ids.copy()
            found.append(ids)
            values.append(result.best_values.copy())
        return np.array(found), np.array(values)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "gpt2", "opt", "phi", "gpt_oss"])
def test_steps_in_a_row_are_those_one_by_one(name: str) -> None:
    decoding = Decoding(name)
    ids, values = decoding.one_by_one(20)
    got_ids, got_values = decoding.call()
    assert got_ids.dtype == np.int32 and got_values.dtype == np.float32
    assert np.array_equal(got_ids, ids) and np.array_equal(got_values, values)
    assert len(np.unique(ids)) > 3 and decoding.executor.compute_s > 0
    again, _ = decoding.call(5)
    assert np.array_equal(again, ids[:5]) and np.array_equal(got_ids, ids), "a result is the caller's"


def test_they_end_with_a_stop_id_with_the_time_and_when_interrupted() -> None:
    decoding = Decoding("llama")
    ids, _ = decoding.one_by_one(20)
    stop = ids[8, 2]
    first = int(np.flatnonzero((ids == stop).any(axis=1))[0])
    assert len(decoding.call(stop_ids=np.array([stop], np.int32))[0]) == first + 1 < 20
    assert len(decoding.call(seconds=0.0)[0]) == 1
    decoding.executor.interrupt()
    assert len(decoding.call()[0]) == 1
    assert len(decoding.call()[0]) == 20, "an interrupt ends one call"


def test_what_cannot_be_is_refused() -> None:
    decoding = Decoding("llama")
    for steps in (0, MAX_STEPS + 1):
        with pytest.raises(EngineError, match=f"1 to {MAX_STEPS}"):
            decoding.call(steps)
    decoding.executor.interrupt()
    with pytest.raises(EngineError, match="ascend"):
        decoding.call(stop_ids=np.array([3, 1], np.int32))
    assert len(decoding.call()[0]) == 20, "a call that failed was interrupted all the same"
    with pytest.raises(EngineError, match="blocks"):
        decoding.call(64)  # the block tables end before
    s, rows = decoding.inputs.sequences, decoding.inputs.logit_rows
    positions = StepInputs(sequences=s, logit_rows=rows, positions=np.zeros(3, np.int32))
    with pytest.raises(UsageError, match="positions"):
        decoding.executor.execute_steps(decoding.first, positions, 2, FOREVER, NONE)
    with pytest.raises(UsageError, match="logit_rows"):
        decoding.executor.execute_steps(decoding.first, StepInputs(sequences=s), 2, FOREVER, NONE)


def test_a_plan_with_host_operations_makes_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.ops.reference import REFERENCE

    monkeypatch.setitem(REFERENCE, "twist", lambda x, *, factor: x * factor)
    decoder, store, recording = recorded("llama")
    layout = layout_of(decoder, 4)
    twisted = planted(recording, value_of(recording, "gate"), "twist", factor=1.0)
    executor = NativeExecutor(twisted, store, layout, 20, 64, kv_dtype="fp32")
    assert executor.host_ops == ("twist",) and executor.max_steps == 1
    with pytest.raises(EngineError, match="1 to 1"):
        executor.execute_steps(NONE, StepInputs(), 2, FOREVER, NONE)
    engine = Engine(executor, max_model_len=40, max_num_seqs=2, run_ahead_s=FOREVER)
    engine.add_request(Request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=6)))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [len(output.token_ids) for output in outputs] == [1] * 6


def prompts_of(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, 90, 40).tolist()
    return [
        stem[: int(rng.integers(0, 40))] + rng.integers(0, 90, int(rng.integers(1, 9))).tolist() for _ in range(count)
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_engine_that_runs_ahead_gives_the_same_tokens(name: str, prefix_caching: bool) -> None:
    """Requests that come one after another into a small pool, ended by tokens and by length."""
    decoder, store, recording = recorded(name)
    found = []
    for run_ahead_s in (0.0, FOREVER):
        layout = make_layout(decoder.config.caches(), 4, 128, 64, block_tokens=8)
        per_request = layout.blocks_per_sequence(90, 64)
        executor = NativeExecutor(recording, store, layout, 2 * per_request + 1, 64, kv_dtype="fp32")
        calls: list[int] = []
        execute_steps = executor.execute_steps

        def counted(*args: Any, call: Any = execute_steps, done: list[int] = calls) -> Any:
            result = call(*args)
            done.append(len(result[0]))
            return result

        executor.execute_steps = counted  # type: ignore[method-assign]
        engine = Engine(
            executor,
            max_model_len=90,
            max_num_seqs=4,
            max_batched_tokens=64,
            prefix_caching=prefix_caching,
            run_ahead_s=run_ahead_s,
        )
        waiting = [
            Request(str(i), prompt, SamplingParams(temperature=0, max_tokens=12 + 5 * i, stop_token_ids=[i, 40 + i]))
            for i, prompt in enumerate(prompts_of(3, 7))
        ]
        outputs: dict[str, list[int]] = {}
        reasons: dict[str, Any] = {}
        steps = 0
        while waiting or engine.has_unfinished():
            if waiting and steps % 2 == 0:
                engine.add_request(waiting.pop(0))
            for output in engine.step():
                outputs.setdefault(output.request_id, []).extend(output.token_ids)
                reasons[output.request_id] = output.finish_reason, output.stop_reason
            engine.check_integrity()
            steps += 1
        assert engine.blocks.usage == 0
        found.append((outputs, reasons))
        assert (max(calls, default=0) > 4) == bool(run_ahead_s)
    assert found[0] == found[1]
