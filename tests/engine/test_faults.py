"""Faults stay where they arise: in one request, or in the requests of one step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plait.engine.params import SamplingParams
from plait.engine.request import Request
from plait.errors import EngineError
from tests.engine.toy_model import (
    GREEDY,
    PROMPT,
    ToyExecutor,
    finish,
    generate_alone,
    make_engine,
    run_to_end,
    tokens_of,
)


def test_nan_logits_end_only_their_request() -> None:
    class Broken(ToyExecutor):
        def compute(self, token_ids: np.ndarray, inputs: object) -> np.ndarray:
            logits = super().compute(token_ids, inputs)
            owner = np.searchsorted(inputs.sequences.query_start, inputs.logit_rows, side="right") - 1
            logits[inputs.sequences.context_len[owner] >= 12] = math.nan
            return logits

    engine = make_engine(Broken())
    engine.add_request(Request("healthy", [1], SamplingParams(temperature=0, max_tokens=9)))
    engine.add_request(Request("nan", list(range(9)), SamplingParams(temperature=0, max_tokens=9)))
    engine.add_request(Request("score", list(range(20)), SamplingParams(max_tokens=0, prompt_logprobs=0)))
    outputs = run_to_end(engine)
    assert outputs["healthy", 0][-1].finish_reason == "length"
    assert [outputs[n, 0][-1].finish_reason for n in ("nan", "score")] == ["error", "error"]
    assert len(tokens_of(outputs["nan", 0])) == 3
    assert "not finite" in outputs["nan", 0][-1].error


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_prompt_row_that_is_not_finite_ends_every_choice(max_tokens: int) -> None:
    class Broken(ToyExecutor):
        def transform(self, logits: np.ndarray) -> np.ndarray:
            if len(logits) > 1:
                logits[0] = math.nan
            return logits

    engine = make_engine(Broken())
    engine.add_request(Request("a", PROMPT, SamplingParams(n=2, seed=1, prompt_logprobs=0, max_tokens=max_tokens)))
    outputs = run_to_end(engine)
    assert [(o.finish_reason, "not finite" in o.error) for o in (outputs["a", 0][-1], outputs["a", 1][-1])] == [
        ("error", True)
    ] * 2
    assert engine.stats().finished == {"error": 2}
    assert not engine.has_unfinished() and engine.step() == []


@pytest.mark.parametrize("windows", [(0,), (0, 6), (6,)])
def test_keys_and_values_that_gave_nan_are_not_found_by_later_requests(windows: tuple[int, ...]) -> None:
    class Spoiled(ToyExecutor):
        """A block with the mark in a position that is seen makes the logits NaN, as NaN keys would."""

        spoil = False

        def compute(self, token_ids: np.ndarray, inputs: object) -> np.ndarray:
            logits = super().compute(token_ids, inputs)
            for s in range(inputs.sequences.count):
                held = np.unique(inputs.sequences.block_table[:, s])
                if self.spoil:
                    self.spoiled |= set(held.tolist()) - {0}
                if self.spoiled & set(held.tolist()):
                    owner = np.searchsorted(inputs.sequences.query_start, inputs.logit_rows, side="right") - 1
                    logits[owner == s] = math.nan
            return logits

    executor = Spoiled(windows=windows, block_tokens=(4,) * len(windows))
    executor.spoiled = set()
    engine = make_engine(executor, max_batched_tokens=8)
    prompt = list(range(20))
    executor.spoil = True
    engine.add_request(Request("a", prompt, SamplingParams(n=2, temperature=0, max_tokens=4)))
    outputs = run_to_end(engine)
    assert {outputs["a", i][-1].finish_reason for i in range(2)} == {"error"}
    executor.spoil, executor.spoiled = False, set()  # what is written anew is right again; what was listed is not
    engine.add_request(Request("b", prompt, GREEDY))
    outputs = run_to_end(engine)["b", 0]
    assert outputs[-1].num_cached_tokens == 0
    assert (
        tokens_of(outputs)
        == generate_alone(ToyExecutor(windows=windows, block_tokens=(4,) * len(windows)), prompt, GREEDY)[0]
    )


def test_a_sampler_that_raises_ends_the_steps_requests_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    sample = engine.sampler.sample
    engine.add_request(Request("a", PROMPT, SamplingParams(n=2, seed=1, max_tokens=5)))
    engine.add_request(Request("b", PROMPT, GREEDY))

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    for _ in range(5):  # more often than the executor may fail
        monkeypatch.setattr(engine.sampler, "sample", fail)
        outputs = engine.step()
        assert {(o.request_id, o.index, o.finish_reason) for o in outputs} == {
            ("a", 0, "error"), ("a", 1, "error"), ("b", 0, "error"),
        }  # fmt: skip
        assert "MemoryError: no room" in outputs[0].error
        engine.check_integrity()
        monkeypatch.setattr(engine.sampler, "sample", sample)
        engine.add_request(Request("c", PROMPT, GREEDY))
        assert finish(engine, "c")[0] == generate_alone(engine.executor, PROMPT, GREEDY)[0]
        engine.add_request(Request("a", PROMPT, SamplingParams(n=2, seed=1, max_tokens=5)))
        engine.add_request(Request("b", PROMPT, GREEDY))


def test_a_choice_that_ended_before_the_step_failed_keeps_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, SamplingParams(temperature=0, max_tokens=1)))
    engine.add_request(Request("b", PROMPT, GREEDY))
    commit = engine.blocks.commit
    calls = []

    def second_fails(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("broken accounts")
        commit(*arguments)

    monkeypatch.setattr(engine.blocks, "commit", second_fails)
    assert [(o.request_id, o.finish_reason) for o in engine.step()] == [("a", "length"), ("b", "error")]
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_an_add_that_raises_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr("plait.engine.engine.SamplingState", fail)
        with pytest.raises(MemoryError):
            engine.add_request(Request("a", PROMPT, GREEDY))
    assert not engine.has_unfinished()
    engine.add_request(Request("a", PROMPT, GREEDY))
    assert finish(engine)[1] == "length"


def test_a_step_that_raises_ends_its_requests_and_the_loop_survives() -> None:
    class Failing(ToyExecutor):
        failures = 0

        def compute(self, token_ids: np.ndarray, inputs: object) -> np.ndarray:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("out of luck")
            return super().compute(token_ids, inputs)

    executor = Failing()
    engine = make_engine(executor)
    executor.failures = 1
    engine.add_request(Request("a", PROMPT, SamplingParams(n=2, seed=1)))
    outputs = run_to_end(engine)
    assert [outputs["a", i][-1].finish_reason for i in range(2)] == ["error", "error"]
    assert "out of luck" in outputs["a", 0][-1].error
    engine.add_request(Request("b", PROMPT, GREEDY))
    assert finish(engine, "b")[0] == generate_alone(executor, PROMPT, GREEDY)[0]
    executor.failures = 3
    with pytest.raises(EngineError, match="3 steps in a row failed"):
        for i in range(3):
            engine.add_request(Request(f"c{i}", PROMPT, GREEDY))
            engine.step()


def test_masks_that_leave_no_token_end_only_their_request() -> None:
    engine = make_engine()
    # Nothing on arrival says so: the second token may not be what the first had to be.
    params = SamplingParams(allowed_token_ids=[3], bad_words_token_ids=[[3, 3]])
    engine.add_request(Request("a", PROMPT, params))
    engine.add_request(Request("b", PROMPT, GREEDY))
    outputs = run_to_end(engine)
    assert outputs["a", 0][-1].finish_reason == "error" and outputs["b", 0][-1].finish_reason == "length"
    assert tokens_of(outputs["a", 0]) == [3] and "the request's masks" in outputs["a", 0][-1].error
