"""Steps in which all sequences only decode take a short way; nothing else changes by it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plait.engine.engine import Engine
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from tests.engine.toy_model import GREEDY, PROMPT, ToyExecutor, generate_alone, make_engine, run_to_end, tokens_of

KINDS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(seed=3, top_p=0.9, max_tokens=17),
    SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=20),
    SamplingParams(temperature=0, min_tokens=9, stop_token_ids=list(range(0, 50, 3)), max_tokens=20),
]


def count_schedules(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Running sequences at every call of the scheduler from now on."""
    calls: list[int] = []
    schedule = engine.scheduler.schedule

    def counted() -> dict:
        calls.append(len(engine.scheduler.running))
        return schedule()

    monkeypatch.setattr(engine.scheduler, "schedule", counted)
    return calls


@pytest.mark.parametrize("windows", [(0,), (0, 6), (3, 5)])
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:2], KINDS])
def test_tokens_are_those_of_each_request_alone(windows: tuple[int, ...], kinds: list[SamplingParams]) -> None:
    executor = ToyExecutor(windows=windows, block_tokens=(4,) * len(windows), num_blocks=100)
    engine = make_engine(executor)
    for i, params in enumerate(kinds):
        engine.add_request(Request(str(i), PROMPT[i:], params))
    outputs = run_to_end(engine)
    for i, params in enumerate(kinds):
        expected = generate_alone(executor, PROMPT[i:], params)
        assert (tokens_of(outputs[str(i), 0]), outputs[str(i), 0][-1].finish_reason) == expected


def test_the_scheduler_is_asked_only_when_a_sequence_comes_or_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(ToyExecutor(num_blocks=100))
    calls = count_schedules(engine, monkeypatch)
    for i in range(3):
        engine.add_request(Request(str(i), PROMPT, SamplingParams(temperature=0, max_tokens=12)))
    outputs = [engine.step() for _ in range(9)]
    scheduled = len(calls)
    assert scheduled <= 3
    assert all(len(o) == 3 for o in outputs[3:])
    engine.add_request(Request("late", PROMPT, GREEDY))
    engine.step()
    assert len(calls) == scheduled + 1
    run_to_end(engine)
    assert engine.stats().computed_tokens == 3 * (len(PROMPT) + 11) + len(PROMPT) + 7 - engine.stats().prefix_hit_tokens


def test_sequences_that_run_out_of_blocks_go_back_to_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ToyExecutor(num_blocks=9, windows=(0,), block_tokens=(4,))
    engine = make_engine(executor)
    calls = count_schedules(engine, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=16)
    for name in ("a", "b"):
        engine.add_request(Request(name, PROMPT[:4] + [len(name), ord(name) % 50], params))
    outputs = run_to_end(engine)
    assert engine.scheduler.num_preemptions > 0 and len(calls) < engine.stats().steps
    for name in ("a", "b"):
        prompt = PROMPT[:4] + [len(name), ord(name) % 50]
        assert tokens_of(outputs[name, 0]) == generate_alone(executor, prompt, params)[0]


def test_a_row_that_is_not_finite_ends_its_request_and_no_other() -> None:
    class Broken(ToyExecutor):
        def compute(self, token_ids: np.ndarray, inputs: object) -> np.ndarray:
            logits = super().compute(token_ids, inputs)
            owner = np.searchsorted(inputs.sequences.query_start, inputs.logit_rows, side="right") - 1
            logits[inputs.sequences.context_len[owner] >= 16] = math.nan
            return logits

    engine = make_engine(Broken(num_blocks=100))
    engine.add_request(Request("long", PROMPT, SamplingParams(temperature=0, max_tokens=20)))
    engine.add_request(Request("short", PROMPT[:2], SamplingParams(temperature=0, max_tokens=10)))
    outputs = run_to_end(engine)
    assert outputs["long", 0][-1].finish_reason == "error" and "not finite" in outputs["long", 0][-1].error
    assert len(tokens_of(outputs["long", 0])) == 8
    assert tokens_of(outputs["short", 0]) == generate_alone(ToyExecutor(), PROMPT[:2], SamplingParams(
        temperature=0, max_tokens=10))[0]  # fmt: skip


def test_abort_stop_and_new_weights_in_the_middle() -> None:
    executor = ToyExecutor(num_blocks=100)
    engine = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=20)
    for name in ("a", "b", "c"):
        engine.add_request(Request(name, PROMPT, params))
    got: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def step() -> None:
        for output in engine.step():
            got[output.request_id] += output.token_ids
        engine.check_integrity()

    for _ in range(6):
        step()
    engine.abort("a")
    engine.stop("b")
    step()
    engine.refresh()
    while engine.has_unfinished():
        step()
    expected = generate_alone(executor, PROMPT, params)[0]
    assert got["c"] == expected and got["a"] == got["b"] == expected[: len(got["a"])]


def test_the_time_of_steps_and_of_computing_is_told() -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, SamplingParams(seed=1, max_tokens=8)))
    run_to_end(engine)
    stats = engine.stats()
    assert len(engine.step_times) == stats.steps
    assert stats.step_s == pytest.approx(sum(step for step, _ in engine.step_times))
    assert stats.compute_s == pytest.approx(sum(compute for _, compute in engine.step_times))
    assert all(0 < compute < step for step, compute in engine.step_times)
    executor = engine.executor
    executor.compute_s = 0.0  # an executor that measures itself is believed
    engine.add_request(Request("a", PROMPT, GREEDY))
    run_to_end(engine)
    assert engine.step_times[-1][1] == 0
