"""One request, or a few: what is refused, how it ends, and what is reported."""

from __future__ import annotations

import numpy as np
import pytest

from plait.engine.engine import Engine
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from plait.errors import CapacityError, RequestError
from tests.engine.toy_model import (
    GREEDY,
    PROMPT,
    VOCAB,
    ToyExecutor,
    finish,
    generate_alone,
    logits_without_cache,
    make_engine,
    run_to_end,
    tokens_of,
)


class ScriptedExecutor(ToyExecutor):
    """The toy model with something added to chosen logits: favour = {id: logit}."""

    def __init__(self, favour: dict[int, float]) -> None:
        super().__init__()
        self.favour = favour

    def transform(self, logits: np.ndarray) -> np.ndarray:
        for token, logit in self.favour.items():
            logits[:, token] += logit
        return logits


# Refusals


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ([VOCAB + 3], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([1.5], GREEDY, "prompt"),
        ([[1], [2, 3]], GREEDY, "prompt"),
        ([1], SamplingParams(logit_bias={"191222": -100, "5": 5}), "logit_bias"),
        ([1], SamplingParams(stop_token_ids=[VOCAB + 10], min_tokens=1), "stop_token_ids"),
        ([1], SamplingParams(allowed_token_ids=[VOCAB]), "allowed_token_ids"),
        ([1], SamplingParams(bad_words_token_ids=[[VOCAB]]), "bad_words"),
        ([1], SamplingParams(bad_words=["x"]), "bad_words"),
        ([1], SamplingParams(dry_multiplier=1), "dry_sequence_breakers"),
        ([1], SamplingParams(logprobs=21), "logprobs"),
        ([1], SamplingParams(prompt_logprobs=10**9), "prompt_logprobs"),
        ([1] * 61, GREEDY, "prompt"),
        ([1] * 600, GREEDY, "prompt"),
        ([1] * 60, GREEDY, "prompt"),
        ([1] * 8, SamplingParams(max_tokens=57), "max_tokens"),
        ([1], SamplingParams(max_tokens=10**12), "max_tokens"),
        ([1] * 60, SamplingParams(max_tokens=None), "prompt"),
    ],
)
def test_a_wrong_request_is_refused_by_name_and_hurts_nobody(prompt: list, params: SamplingParams, field: str) -> None:
    engine = make_engine()
    engine.add_request(Request("healthy", PROMPT, GREEDY))
    engine.step()
    with pytest.raises(RequestError) as caught:
        engine.add_request(Request("wrong", prompt, params))
    assert caught.value.field == field
    assert finish(engine, "healthy")[1] == "length"


EVERY_ID = list(range(VOCAB))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": dict.fromkeys(EVERY_ID, -100)}, "logit_bias"),
        ({"stop_token_ids": EVERY_ID, "min_tokens": 1}, "min_tokens"),
        ({"stop_token_ids": EVERY_ID[1:], "min_tokens": 1, "logit_bias": {0: -100}}, "min_tokens"),
        ({"allowed_token_ids": [7], "min_tokens": 1}, "min_tokens"),  # 7 is the model's end
        ({"allowed_token_ids": [3, 4], "logit_bias": {3: -100}, "bad_words_token_ids": [[4]]}, "bad_words"),
    ],
)
def test_a_request_that_leaves_no_token_to_sample_is_refused_on_arrival(options: dict, field: str) -> None:
    engine = make_engine(eos_token_ids=[7])
    with pytest.raises(RequestError, match="leaves no token") as caught:
        engine.add_request(Request("a", PROMPT, SamplingParams(**options)))
    assert caught.value.field == field
    assert not engine.has_unfinished()


def test_logits_that_the_requests_own_penalty_makes_infinite_are_not_the_models_fault() -> None:
    # 3e37 / 0.01 is beyond float32.
    engine = make_engine(ScriptedExecutor({PROMPT[0]: 3e37}))
    ends, cached = {}, {}
    for name, penalty in (("before", 1.0), ("wrong", 0.01), ("after", 1.0)):
        engine.add_request(Request(name, PROMPT, SamplingParams(temperature=0, repetition_penalty=penalty)))
        ends[name] = run_to_end(engine)[name, 0][-1]
        cached[name] = ends[name].num_cached_tokens
    assert ends["wrong"].finish_reason == "error"
    assert "the request's penalties" in ends["wrong"].error and "model" not in ends["wrong"].error
    assert cached["wrong"] == cached["after"] > 0


def test_the_largest_ids_of_the_vocabulary_are_valid_everywhere() -> None:
    top = VOCAB - 1
    engine = make_engine(ToyExecutor(sampled_ids=VOCAB))
    params = SamplingParams(
        max_tokens=3,
        logit_bias={top: 1},
        stop_token_ids=[top],
        allowed_token_ids=[top, 1],
        bad_words_token_ids=[[top]],
        seed=0,
    )
    engine.add_request(Request("a", [top], params))
    assert finish(engine) == ([1, 1, 1], "length", None)


def test_context_overflow_says_the_numbers() -> None:
    with pytest.raises(CapacityError, match="context holds 60 tokens, but the prompt has 8 and 57 more are requested"):
        make_engine().add_request(Request("a", [1] * 8, SamplingParams(max_tokens=57)))


def test_what_cannot_fit_in_the_pool_alone_is_refused_on_arrival() -> None:
    # 4 usable blocks of 4 tokens; 16 prompt tokens and one more (never stored) fit, two more do not
    executor = ToyExecutor(num_blocks=5, windows=(0,), block_tokens=(4,))
    engine = make_engine(executor)
    with pytest.raises(CapacityError, match="pool holds 16 tokens of one sequence, but the prompt has 16 and 2 more"):
        engine.add_request(Request("a", [1] * 16, SamplingParams(max_tokens=2)))
    engine.add_request(Request("a", [1] * 16, SamplingParams(max_tokens=1, temperature=0)))
    assert finish(engine)[1] == "length"


def test_an_id_in_use_is_refused_and_free_again_at_the_end() -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, GREEDY))
    with pytest.raises(RequestError, match="in use"):
        engine.add_request(Request("a", PROMPT, GREEDY))
    finish(engine)
    engine.add_request(Request("a", PROMPT, GREEDY))
    finish(engine)


# How a request ends


def test_max_tokens_none_fills_the_context_exactly() -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, SamplingParams(temperature=0, max_tokens=None)))
    tokens, reason, _ = finish(engine)
    assert (len(PROMPT) + len(tokens), reason) == (60, "length")


@pytest.mark.parametrize("eos", [11, 12, 13])
def test_every_end_token_of_the_union_stops(eos: int) -> None:
    executor = ScriptedExecutor({eos: 100})
    engine = make_engine(executor, eos_token_ids=[11, 12])
    engine.add_request(Request("a", PROMPT, GREEDY, eos_token_ids=frozenset([13])))
    assert finish(engine) == ([eos], "stop", None)


def test_ignore_eos_ignores_the_models_ends_but_not_the_callers_stops() -> None:
    executor = ScriptedExecutor({11: 100})
    engine = make_engine(executor, eos_token_ids=[11])
    engine.add_request(Request("a", PROMPT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)))
    assert finish(engine) == ([11] * 5, "length", None)
    executor.favour = {7: 100}
    engine.add_request(Request("a", PROMPT, SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[7])))
    assert finish(engine) == ([7], "stop", 7)


def test_min_tokens_holds_every_end_back() -> None:
    executor = ScriptedExecutor({11: 90, 12: 100, 7: 95})
    engine = make_engine(executor, eos_token_ids=[11, 12])
    engine.add_request(
        Request("a", [1] * 50, SamplingParams(temperature=0, max_tokens=9, min_tokens=5, stop_token_ids=[7]))
    )
    tokens, reason, _ = finish(engine)
    assert len(tokens) == 6 and tokens[-1] == 12 and reason == "stop"
    assert not {7, 11, 12} & set(tokens[:-1])


# Several choices


def test_choices_differ_repeat_and_do_not_depend_on_traffic() -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=6)

    def run(engine: Engine) -> list[list[int]]:
        engine.add_request(Request("a", PROMPT, params))
        outputs = run_to_end(engine)
        return [tokens_of(outputs["a", i]) for i in range(4)]

    first = run(make_engine())
    assert len({tuple(t) for t in first}) == 4
    busy = make_engine(max_num_seqs=3)  # the fourth choice has to wait
    for i in range(3):
        busy.add_request(Request(f"b{i}", PROMPT[i:], SamplingParams(seed=i)))
    assert run(busy) == first
    alone = make_engine()
    alone.add_request(Request("a", PROMPT, SamplingParams(seed=7, max_tokens=6)))
    assert finish(alone)[0] == first[0]


def test_the_prompt_of_several_choices_is_computed_once() -> None:
    engine = make_engine(ToyExecutor(num_blocks=200), max_num_seqs=8)
    engine.add_request(Request("a", PROMPT, SamplingParams(n=8, seed=1, max_tokens=4)))
    run_to_end(engine)
    # every choice computes all of its 4 output tokens but the last
    assert engine.stats().computed_tokens == len(PROMPT) + 8 * 3
    assert engine.stats().cow_copies == 0  # 8 prompt tokens fill their blocks


def test_greedy_choices_are_equal_and_each_stops_by_itself() -> None:
    engine = make_engine(eos_token_ids=[generate_alone(ToyExecutor(), PROMPT, GREEDY)[0][3]])
    engine.add_request(Request("a", PROMPT, SamplingParams(n=3, temperature=0)))
    outputs = run_to_end(engine)
    results = [(tokens_of(outputs["a", i]), outputs["a", i][-1].finish_reason) for i in range(3)]
    assert results[0] == results[1] == results[2] and results[0][1] == "stop"


def test_no_seed_draws_a_new_one_each_time_unless_the_engine_has_one() -> None:
    def run(engine: Engine) -> list[int]:
        engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=10)))
        return finish(engine)[0]

    engine = make_engine(seed=5)
    assert run(engine) != run(engine)
    assert run(make_engine(seed=5)) == run(make_engine(seed=5))


# Prefix cache and log-probabilities


@pytest.mark.parametrize("length", [1, 3, 4, 16, 17])
def test_a_prompt_that_is_cached_in_full_still_computes_its_last_token(length: int) -> None:
    engine = make_engine()
    results = []
    for _ in range(2):
        engine.add_request(Request("a", list(range(length)), GREEDY))
        outputs = run_to_end(engine)["a", 0]
        results.append(tokens_of(outputs))
    assert results[0] == results[1] == generate_alone(engine.executor, list(range(length)), GREEDY)[0]
    assert outputs[-1].num_cached_tokens == (length - 1) // 4 * 4


def test_another_salt_shares_nothing() -> None:
    engine = make_engine()
    for salt, cached in ((None, 0), (None, 8), ("x", 0), ("x", 8), ("y", 0)):
        engine.add_request(Request("a", list(range(9)), GREEDY, cache_salt=salt))
        assert run_to_end(engine)["a", 0][-1].num_cached_tokens == cached


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("rows", [1, 3, 256])
def test_prompt_logprobs_do_not_depend_on_order_chunks_or_a_warm_cache(order: tuple[int, int], rows: int) -> None:
    prompts = [list(range(33)), list(range(8)) + list(range(20, 45))]
    engine = make_engine(max_prompt_rows=rows)
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    for _ in range(2):
        for which in order:
            engine.add_request(Request(str(which), prompts[which], params))
        outputs = run_to_end(engine)
        assert engine.executor.steps and max(len(s.logit_rows) for s in engine.executor.steps) <= max(rows, 1) + 4
        for which in order:
            (output,) = outputs[str(which), 0]
            assert (output.token_ids, output.finish_reason) == ([], "length")
            x = logits_without_cache(engine.executor, np.array(prompts[which])).astype(np.float64)
            expected = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
            assert output.prompt_logprobs[0] is None
            got = [e.logprob for e in output.prompt_logprobs[1:]]
            assert got == pytest.approx(expected[np.arange(32), prompts[which][1:]].tolist(), abs=1e-5)
            for i, entry in enumerate(output.prompt_logprobs[1:]):
                assert [t for t, _ in entry.top] == np.argsort(-expected[i])[:2].tolist()


def test_a_prompt_of_one_token_can_be_scored() -> None:
    engine = make_engine()
    engine.add_request(Request("a", [5], SamplingParams(max_tokens=0, prompt_logprobs=0)))
    (output,) = run_to_end(engine)["a", 0]
    assert (output.prompt_logprobs, output.finish_reason) == ([None], "length")


# What the executor is asked for


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"temperature": 0}, False),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": 0.5}, True),
        ({"temperature": 0, "logprobs": 0}, True),
        ({"temperature": 0, "repetition_penalty": 1.1}, True),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, True),
        ({"temperature": 0, "allowed_token_ids": [1, 2]}, True),
        ({"temperature": 0, "prompt_logprobs": 0}, True),
    ],
)
def test_logits_are_asked_for_only_where_somebody_reads_them(options: dict, needed: bool) -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=3, **options)))
    run_to_end(engine)
    assert engine.executor.wanted[0][0] == needed
    assert not any(hidden for _, hidden in engine.executor.wanted)


def test_a_prompts_first_chunks_need_no_logits_and_min_tokens_only_until_they_are_there() -> None:
    engine = make_engine(max_batched_tokens=8)
    engine.add_request(Request("a", list(range(20)), SamplingParams(max_tokens=2, seed=1)))
    run_to_end(engine)
    assert [logits for logits, _ in engine.executor.wanted] == [False, False, True, True]
    engine = make_engine(eos_token_ids=[7])
    engine.add_request(Request("a", [1], SamplingParams(temperature=0, max_tokens=5, min_tokens=3)))
    run_to_end(engine)
    assert [logits for logits, _ in engine.executor.wanted][:4] == [True, True, True, False]


def test_ids_beyond_those_that_may_be_sampled_are_never_taken_from_the_executor() -> None:
    executor = ToyExecutor(sampled_ids=VOCAB - 20)
    engine = make_engine(executor)
    engine.add_request(Request("a", PROMPT, SamplingParams(temperature=0, max_tokens=20)))
    tokens, _, _ = finish(engine)
    assert max(tokens) < VOCAB - 20
    for i, token in enumerate(tokens):
        row = logits_without_cache(executor, np.array(PROMPT + tokens[:i]))[-1]
        assert token == row[: VOCAB - 20].argmax()


# Abort, stop, order


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("choices", [1, 4])
def test_abort_frees_everything_at_once(steps: int, choices: int) -> None:
    engine = make_engine()
    engine.add_request(Request("a", list(range(30)), SamplingParams(n=choices, max_tokens=20, seed=1)))
    for _ in range(steps):
        engine.step()
    outputs = engine.abort("a")
    assert [(o.index, o.finish_reason) for o in outputs] == [(i, "abort") for i in range(choices)]
    assert engine.blocks.usage == 0 and not engine.has_unfinished()
    engine.check_integrity()
    assert engine.abort("a") == [] and engine.step() == []


def test_stop_ends_one_choice_and_the_others_go_on() -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, SamplingParams(n=2, seed=1, max_tokens=10)))
    engine.step()
    engine.stop("a", 1)
    engine.stop("a", 1)
    engine.stop("gone", 0)
    outputs = run_to_end(engine)
    assert ("a", 1) not in outputs
    assert len(tokens_of(outputs["a", 0])) == 9
    assert engine.stats().finished == {"stop": 1, "length": 1}


def test_running_requests_get_a_token_every_step_while_a_long_prompt_comes_in() -> None:
    engine = make_engine(max_batched_tokens=8)
    engine.add_request(Request("short", [1, 2], SamplingParams(temperature=0, max_tokens=12)))
    engine.step()
    engine.add_request(Request("long", list(range(40)), GREEDY))
    for _ in range(5):
        assert "short" in {o.request_id for o in engine.step()}


def test_priority_goes_before_arrival() -> None:
    engine = make_engine(max_num_seqs=1, policy="priority")
    for name, priority in (("late", 5), ("first", 0), ("also late", 5)):
        engine.add_request(Request(name, PROMPT, SamplingParams(temperature=0, max_tokens=1), priority=priority))
    assert [engine.step()[0].request_id for _ in range(3)] == ["first", "late", "also late"]


# New weights


def test_refresh_forgets_what_older_weights_computed() -> None:
    executor = ToyExecutor()
    engine = make_engine(executor)
    prompt = list(range(20))
    engine.add_request(Request("a", prompt, GREEDY))
    before = finish(engine)[0]
    executor.weights = np.uint64(12345)
    engine.refresh()
    engine.add_request(Request("a", prompt, GREEDY))
    after = finish(engine)[0]
    assert after == generate_alone(executor, prompt, GREEDY)[0] != before


def test_timing_and_counters() -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, GREEDY))
    timing = run_to_end(engine)["a", 0][-1].timing
    assert timing.arrival_s <= timing.first_scheduled_s <= timing.first_token_s <= timing.finished_s
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.computed_tokens) == (8, 8, 15)
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)


@pytest.mark.parametrize(
    "options",
    [{"policy": "lifo"}, {"max_num_seqs": 0}, {"max_model_len": 0}, {"max_num_seqs": 17}, {"max_prompt_rows": 0}],
)
def test_an_engine_that_cannot_work_is_refused(options: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        make_engine(**options)
