"""Several greedy steps in one call bring what the same steps bring one by one, and leave the same books."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter

import numpy as np
import pytest

from plait.engine.engine import Engine
from plait.engine.outputs import OutputProcessor
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from plait.engine.shared_steps import SharedSteps
from plait.errors import RequestError
from plait.memory.blocks import BlockManager
from plait.memory.prefix_cache import first_visible_block
from plait.ops.step import Sequences, StepInputs
from tests.engine.test_engine_schedules import SHAPES, run_schedules
from tests.engine.toy_model import PROMPT, ToyExecutor, generate_alone, make_engine, make_layout, run_to_end, tokens_of

ALWAYS = 60.0  # seconds: no call ends for want of time


class AheadExecutor(ToyExecutor):
    """The toy model with execute_steps, one execute() after another. done: steps of every such call.

    rng: where given, calls end at a random step, as those do whose time is up. news: called before every step of a
    call with the number of those before it, where another thread would have its say.
    """

    max_steps = 64

    def __init__(self, rng: np.random.Generator | None = None, **options: object) -> None:
        super().__init__(**{"max_batched_tokens": 64, **options})
        self.rng = rng
        self.done: list[int] = []
        self.asked: list[int] = []
        self.interrupted = False
        self.news = lambda before: None

    def execute_steps(
        self, token_ids: np.ndarray, inputs: StepInputs, steps: int, seconds: float, stop_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        assert seconds > 0 and 1 < steps <= self.max_steps and (np.diff(stop_ids) > 0).all()
        most = steps if self.rng is None else int(self.rng.integers(1, steps + 1))
        ids, values = [], []
        s = inputs.sequences
        context, copies = s.context_len, s.copies
        while True:
            self.news(len(ids))
            sequences = Sequences(s.query_start, context, s.block_table, copies)
            step = StepInputs(sequences=sequences, logit_rows=inputs.logit_rows)
            result = self.execute(token_ids, step, logits=False)
            ids.append(result.best_ids)
            values.append(result.best_values)
            token_ids, context, copies = result.best_ids, context + np.int32(1), copies[:0]
            ended = np.isin(result.best_ids, stop_ids).any() or not np.isfinite(result.best_values).all()
            if len(ids) == most or ended or self.interrupted:
                break
        self.interrupted = False
        self.done.append(len(ids))
        self.asked.append(steps)
        return np.array(ids), np.array(values)

    def interrupt(self) -> None:
        self.interrupted = True


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, **options})


def ahead_engine(executor: AheadExecutor | None = None, **options: object) -> Engine:
    return make_engine(executor or AheadExecutor(num_blocks=100), **{"run_ahead_s": ALWAYS, **options})


def random_params(rng: np.random.Generator) -> SamplingParams:
    if rng.random() < 0.1:
        return SamplingParams(seed=int(rng.integers(1 << 40)), max_tokens=int(rng.integers(1, 5)))
    return SamplingParams(
        n=int(rng.choice([1, 1, 1, 2])),
        temperature=0,
        max_tokens=int(rng.integers(3, 18)),
        min_tokens=int(rng.choice([0, 0, 3])),
        stop_token_ids=rng.choice(50, int(rng.integers(3)), replace=False).tolist(),
        ignore_eos=bool(rng.random() < 0.3),
    )


def one_schedule(seed: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    executor = AheadExecutor(
        rng if seed % 2 else None,
        num_blocks=int(rng.integers(26, 60)),
        max_batched_tokens=int(rng.integers(6, 20)),
        **SHAPES[seed % 4],
    )
    engine = Engine(
        executor,
        max_model_len=40,
        max_num_seqs=int(rng.integers(1, 7)),
        policy="priority" if seed % 3 == 0 else "fcfs",
        eos_token_ids=[7],
        prefix_caching=seed % 5 != 0,
        run_ahead_s=ALWAYS,
    )
    stems = [rng.integers(0, 50, 16).tolist() for _ in range(2)]
    requests: dict[str, Request] = {}
    for i in range(int(rng.integers(3, 9))):
        stem = stems[int(rng.integers(2))][: int(rng.integers(0, 17))]
        prompt = stem + rng.integers(0, 50, int(rng.integers(1, 7))).tolist()
        requests[f"r{i}"] = Request(f"r{i}", prompt, random_params(rng), priority=int(rng.integers(3)))
    waiting = list(requests.values())
    outputs: dict[tuple[str, int], list] = {}
    aborted: set[str] = set()
    events: Counter[str] = Counter()
    while waiting or engine.has_unfinished():
        if waiting and (rng.random() < 0.2 or not engine.has_unfinished()):
            engine.add_request(waiting.pop(0))
        if rng.random() < 0.2:
            engine.interrupt()
        before = engine.stats()
        new = engine.step()
        assert len({(o.request_id, o.index) for o in new}) == len(new), "one output per choice"
        assert engine.stats().generated_tokens - before.generated_tokens == sum(len(o.token_ids) for o in new)
        if rng.random() < 0.05 and (running := engine.scheduler.running):
            victim = running[int(rng.integers(len(running)))].owner.request.request_id
            new += engine.abort(victim)
            aborted.add(victim)
        if rng.random() < 0.02:
            engine.refresh()
            events["refreshes"] += 1
        for output in new:
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.check_integrity()
        check_no_spare_blocks(engine)
    assert engine.blocks.usage == 0
    for request in requests.values():
        for choice in range(request.params.n):
            got = outputs[request.request_id, choice]
            expected, reason = generate_alone(
                executor, request.prompt_token_ids, request.params, frozenset([7]), choice, max_total=40
            )
            assert all(o.finish_reason is None for o in got[:-1])
            if got[-1].finish_reason == "abort":
                assert request.request_id in aborted
                assert tokens_of(got) == expected[: len(tokens_of(got))]
                events["aborts"] += 1
                continue
            assert (tokens_of(got), got[-1].finish_reason) == (expected, reason), (request.request_id, choice)
            events["ended by a token"] += reason == "stop"
    stats = engine.stats()
    for name in ("preemptions", "prefix_hit_tokens", "recycled_blocks", "evictions"):
        events[name] += getattr(stats, name)
    events["steps ahead"] += sum(executor.done) - len(executor.done)
    events["ended early"] += sum(done < asked for done, asked in zip(executor.done, executor.asked, strict=True))
    events["as long as asked"] += sum(1 < done == asked for done, asked in zip(executor.done, executor.asked))  # noqa: B905
    return events


def check_no_spare_blocks(engine: Engine) -> None:
    """Between steps nobody holds blocks for more than the tokens that the next step computes."""
    for seq in engine.scheduler.running:
        held = seq.held
        for g, group in enumerate(engine.blocks.layout.groups):
            assert held.num_blocks[g] <= -(-len(seq.tokens) // group.block_tokens), (seq.key, g)
            assert held.first_block[g] == first_visible_block(held.num_computed, group.cache.window, group.block_tokens)


COUNTED = (
    *("aborts", "refreshes", "ended by a token", "preemptions", "prefix_hit_tokens", "recycled_blocks", "evictions"),
    *("steps ahead", "ended early", "as long as asked"),
)


def test_random_schedules_give_every_request_the_tokens_it_gets_alone() -> None:
    run_schedules(one_schedule, range(24), COUNTED)


@pytest.mark.slow
def test_many_random_schedules_give_every_request_the_tokens_it_gets_alone() -> None:
    run_schedules(one_schedule, range(24, 600), COUNTED)


def test_nothing_is_counted_twice_or_not_at_all() -> None:
    """Sequences that end at different times, by a token and by length: figures as without running ahead."""
    found = []
    for run_ahead_s in (0.0, ALWAYS):
        executor = AheadExecutor(num_blocks=100)
        engine = ahead_engine(executor, run_ahead_s=run_ahead_s)
        engine.add_request(Request("a", PROMPT, greedy(max_tokens=17)))
        engine.add_request(Request("b", PROMPT[1:], greedy(max_tokens=9)))
        stop = generate_alone(executor, PROMPT[2:], greedy())[0][12]
        engine.add_request(Request("c", PROMPT[2:], greedy(stop_token_ids=[stop])))
        outputs = run_to_end(engine)
        stats = engine.stats()
        assert len(engine.step_times) == stats.steps
        assert stats.step_s == pytest.approx(sum(step for step, _ in engine.step_times))
        assert stats.compute_s == pytest.approx(sum(compute for _, compute in engine.step_times))
        found.append(
            (
                {key: (tokens_of(o), o[-1].finish_reason, o[-1].stop_reason) for key, o in outputs.items()},
                (stats.steps, stats.generated_tokens, stats.computed_tokens, stats.finished, stats.recycled_blocks),
            )
        )
        assert bool(executor.done) == bool(run_ahead_s)
    assert found[0] == found[1]
    assert found[0][0]["c", 0][1:] == ("stop", stop)


def test_no_sequence_is_computed_past_its_end() -> None:
    executor = AheadExecutor(num_blocks=100)
    engine = ahead_engine(executor)
    engine.add_request(Request("short", PROMPT, greedy(max_tokens=5)))
    engine.add_request(Request("long", PROMPT, greedy(max_tokens=30)))
    run_to_end(engine)
    for step in executor.steps:
        assert (step.sequences.context_len <= len(PROMPT) + 29).all()
        if step.sequences.count == 2:
            assert step.sequences.context_len[0] <= len(PROMPT) + 4
    assert executor.asked == [4, 25]


def test_a_token_that_ends_another_sequence_only_ends_the_call_early() -> None:
    executor = AheadExecutor(num_blocks=100)
    tokens = generate_alone(executor, PROMPT, greedy())[0]
    others = ([i, i + 1] for i in range(40))
    other = next(p for p in others if tokens[9] not in generate_alone(executor, p, greedy(max_tokens=30))[0])
    engine = ahead_engine(executor)
    engine.add_request(Request("other", other, greedy(max_tokens=30, stop_token_ids=[tokens[9]])))
    engine.add_request(Request("a", PROMPT, greedy()))
    outputs = run_to_end(engine)
    assert tokens_of(outputs["a", 0]) == tokens and outputs["a", 0][-1].finish_reason == "length"
    assert len(tokens_of(outputs["other", 0])) == 30
    assert executor.done[0] == tokens.index(tokens[9]) < executor.asked[0]


def test_end_tokens_do_not_end_a_call_of_requests_that_ignore_them() -> None:
    executor = AheadExecutor(num_blocks=100)
    tokens = generate_alone(executor, PROMPT, greedy())[0]
    for ignore in (True, False):
        engine = ahead_engine(executor, eos_token_ids=[tokens[5]])
        executor.done.clear()
        engine.add_request(Request("a", PROMPT, greedy(ignore_eos=ignore, max_tokens=12)))
        outputs = run_to_end(engine)["a", 0]
        expected = tokens[:12] if ignore else tokens[: tokens.index(tokens[5]) + 1]
        assert tokens_of(outputs) == expected
        assert executor.done == [len(expected) - 1]


def test_rows_that_need_logits_are_never_run_ahead() -> None:
    for params in (greedy(logprobs=1), greedy(repetition_penalty=1.2), SamplingParams(seed=1, max_tokens=20)):
        executor = AheadExecutor(num_blocks=100)
        engine = ahead_engine(executor)
        engine.add_request(Request("a", PROMPT, params))
        engine.add_request(Request("b", PROMPT[1:], greedy()))
        outputs = run_to_end(engine)
        assert tokens_of(outputs["a", 0]) == generate_alone(executor, PROMPT, params)[0]
        assert not executor.done and all(len(o.token_ids) == 1 for o in outputs["a", 0])


def test_min_tokens_are_passed_before_anything_is_run_ahead() -> None:
    executor = AheadExecutor(num_blocks=100)
    params = greedy(min_tokens=9, stop_token_ids=list(range(0, 50, 3)))
    engine = ahead_engine(executor)
    engine.add_request(Request("a", PROMPT, params))
    outputs = run_to_end(engine)["a", 0]
    assert (tokens_of(outputs), outputs[-1].finish_reason) == generate_alone(executor, PROMPT, params)
    assert all(len(o.token_ids) == 1 for o in outputs[:9])


def test_requests_that_may_be_admitted_are_not_kept_waiting() -> None:
    executor = AheadExecutor(num_blocks=9, windows=(0,), block_tokens=(4,))
    engine = ahead_engine(executor)
    engine.add_request(Request("a", PROMPT, greedy(max_tokens=12)))
    engine.add_request(Request("b", [5] * 20, greedy(max_tokens=2)))  # finds no blocks before the other one's end
    run_to_end(engine)
    assert not executor.done


def test_nothing_is_evicted_for_tokens_that_may_not_come() -> None:
    """Blocks ahead are free ones; where the rest of the pool is cached, a call stays within the blocks it has."""
    executor = AheadExecutor(num_blocks=13, windows=(0,), block_tokens=(4,))
    engine = ahead_engine(executor, max_model_len=46)
    for i in range(3):  # all twelve blocks become findable
        engine.add_request(Request("x", [10 + i] * 16, greedy(max_tokens=1)))
        run_to_end(engine)
    assert not engine.blocks.pool.free
    engine.add_request(Request("a", PROMPT, greedy(max_tokens=24)))
    outputs: list = []
    while engine.has_unfinished():
        outputs += engine.step()
        engine.check_integrity()
        if running := engine.scheduler.running:
            assert engine.stats().evictions == sum(running[0].held.num_blocks)
    assert tokens_of(outputs) == generate_alone(executor, PROMPT, greedy(max_tokens=24))[0]
    assert set(executor.done[:-1]) == {4}, "from the beginning of a block to its end"


def test_an_interrupt_ends_the_call_after_its_present_step() -> None:
    executor = AheadExecutor(num_blocks=100)
    engine = ahead_engine(executor)
    engine.add_request(Request("a", PROMPT, greedy(max_tokens=14)))
    engine.step()
    executor.news = lambda before: engine.interrupt() if before == 3 else None
    (output,) = engine.step()
    assert len(output.token_ids) == 4 and executor.done == [4]
    executor.news = lambda before: None
    engine.interrupt()  # between two calls: the next one is of one step
    (output,) = engine.step()
    assert len(output.token_ids) == 1
    (output,) = engine.step()
    assert len(output.token_ids) == 8 and output.finish_reason == "length"


def test_an_engine_without_such_an_executor_may_be_interrupted_too() -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, greedy()))
    engine.interrupt()
    assert tokens_of(run_to_end(engine)["a", 0]) == generate_alone(ToyExecutor(), PROMPT, greedy())[0]


@pytest.mark.parametrize("at", [16, 17, 20])
def test_a_row_that_is_not_finite_ends_its_request_as_it_would_alone(at: int) -> None:
    class Broken(AheadExecutor):
        def compute(self, token_ids: np.ndarray, inputs: StepInputs) -> np.ndarray:
            logits = super().compute(token_ids, inputs)
            owner = np.searchsorted(inputs.sequences.query_start, inputs.logit_rows, side="right") - 1
            logits[inputs.sequences.context_len[owner] >= at] = math.nan
            return logits

    found = []
    for run_ahead_s in (0.0, ALWAYS):
        engine = ahead_engine(Broken(num_blocks=100), run_ahead_s=run_ahead_s)
        engine.add_request(Request("long", PROMPT, greedy()))
        engine.add_request(Request("short", PROMPT[:2], greedy(max_tokens=10)))
        outputs = run_to_end(engine)
        last = outputs["long", 0][-1]
        assert last.finish_reason == "error" and "not finite" in last.error
        stats = engine.stats()
        figures = (stats.steps, stats.generated_tokens, stats.computed_tokens, stats.finished)
        found.append(({key: tokens_of(o) for key, o in outputs.items()}, figures))
    assert found[0] == found[1]
    assert len(found[0][0]["long", 0]) == at - 8
    assert engine.executor.done


def test_blocks_for_more_steps_are_given_back_where_the_first_has_no_token() -> None:
    class Broken(AheadExecutor):
        broken = False

        def transform(self, logits: np.ndarray) -> np.ndarray:
            if self.broken:
                logits[0] = math.nan
            return logits

    executor = Broken(num_blocks=100)
    engine = ahead_engine(executor)
    engine.add_request(Request("a", PROMPT, greedy()))
    engine.add_request(Request("b", PROMPT, greedy()))
    engine.step()
    executor.broken = True
    ended = engine.step()
    assert executor.done == [1] and [o.finish_reason for o in ended] == ["error", None]
    check_no_spare_blocks(engine)
    executor.broken = False
    tokens = ended[1].token_ids + tokens_of(run_to_end(engine)["b", 0])
    assert tokens == generate_alone(executor, PROMPT, greedy())[0][1:]


def test_a_call_that_fails_ends_the_requests_that_are_in_it() -> None:
    class Failing(AheadExecutor):
        def execute_steps(self, *args: object) -> tuple[np.ndarray, np.ndarray]:
            raise RuntimeError("the roof is gone")

    engine = ahead_engine(Failing(num_blocks=100))
    engine.add_request(Request("a", PROMPT, greedy()))
    outputs = run_to_end(engine)["a", 0]
    assert outputs[-1].finish_reason == "error" and "the roof is gone" in outputs[-1].error
    assert engine.blocks.usage == 0


def test_a_call_that_is_interrupted_by_the_keyboard_is_as_if_it_had_not_been() -> None:
    class Interrupted(AheadExecutor):
        calls = 0

        def execute_steps(self, *args: object) -> tuple[np.ndarray, np.ndarray]:
            result = super().execute_steps(*args)
            self.calls += 1
            if self.calls == 1:
                raise KeyboardInterrupt
            return result

    executor = Interrupted(num_blocks=100)
    engine = ahead_engine(executor)
    engine.add_request(Request("a", PROMPT, greedy()))
    engine.step()
    before = len(engine._requests["a"].choices[0].tokens)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert len(engine._requests["a"].choices[0].tokens) == before
    outputs = run_to_end(engine)
    assert executor.calls > 1
    assert tokens_of(outputs["a", 0]) == generate_alone(ToyExecutor(), PROMPT, greedy())[0][1:]
    engine.check_integrity()
    assert engine.blocks.usage == 0


def test_what_has_come_is_taken_while_another_call_steps() -> None:
    engine = ahead_engine()
    steps = SharedSteps(engine, OutputProcessor(None))
    first, second = (Request(i, PROMPT, greedy(detokenize=False)) for i in "ab")
    with steps.running([first], [None]) as mine, steps.running([second], [None]) as other:
        steps.advance(other)  # the prompts of both
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with steps._lock:
                held.set()
                done.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(10)
        (delta,), results = steps.advance(mine)  # would wait for the lock
        assert (delta.request_id, results, thread.is_alive()) == ("a", [], True)
        done.set()
        thread.join()


def test_steps_that_an_executor_makes_up_are_refused() -> None:
    class Generous(AheadExecutor):
        def execute_steps(self, token_ids: np.ndarray, inputs: StepInputs, steps: int, *more: object):
            return np.zeros((steps + 1, len(token_ids)), np.int32), np.zeros((steps + 1, len(token_ids)), np.float32)

    engine = ahead_engine(Generous(num_blocks=100))
    engine.add_request(Request("a", PROMPT, greedy()))
    outputs = run_to_end(engine)["a", 0]
    assert outputs[-1].finish_reason == "error" and "(20, 1)" in outputs[-1].error


def test_no_more_steps_are_prepared_than_the_time_allows() -> None:
    executor = AheadExecutor(num_blocks=100)
    step_s = 0.004

    def takes_time(before: int) -> None:
        executor.compute_s = step_s * (before + 1)

    executor.news, executor.compute_s = takes_time, 0.0
    engine = ahead_engine(executor, run_ahead_s=0.01)
    engine.add_request(Request("a", PROMPT, greedy()))
    engine.step()
    engine.interrupt()
    engine.step()
    engine.step()
    assert executor.asked == [19, 3], "of which nothing is known, then 4 ms each"
    step_s = 0.02
    engine.step()
    assert executor.asked == [19, 3, 3]
    (output,) = engine.step()
    assert len(output.token_ids) == 1 and executor.asked == [19, 3, 3]


def test_texts_are_told_token_by_token_whatever_came_together() -> None:
    executor = AheadExecutor(num_blocks=100)
    engine = ahead_engine(executor)
    request = Request("a", PROMPT, greedy(detokenize=False))
    processor = OutputProcessor(None)
    processor.add_request(request)
    engine.add_request(request)
    tokens: list[int] = []
    finished = []
    while engine.has_unfinished():
        step = processor.process(engine.step())
        tokens += [t for delta in step.deltas for t in delta.token_ids]
        finished += step.finished
    assert tokens == generate_alone(executor, PROMPT, greedy())[0]
    assert len(finished) == 1 and finished[0].outputs[0].token_ids == tokens


def test_a_call_that_wants_to_come_in_interrupts_the_one_that_runs_ahead() -> None:
    executor = AheadExecutor(num_blocks=100)
    engine = ahead_engine(executor)
    steps = SharedSteps(engine, OutputProcessor(None))
    came_in = threading.Event()

    def come_in() -> None:
        with steps.running([Request("b", PROMPT, greedy(detokenize=False, max_tokens=1))], [None]):
            came_in.set()

    thread = threading.Thread(target=come_in)

    def news(before: int) -> None:
        if before == 2:
            thread.start()
            deadline = time.monotonic() + 5
            while not executor.interrupted and time.monotonic() < deadline:  # it waits for the lock, and has said so
                time.sleep(0.001)

    with steps.running([Request("a", PROMPT, greedy(detokenize=False))], [None]) as mail:
        steps.advance(mail)
        executor.news = news
        steps.advance(mail)
        executor.news = lambda before: None
        assert executor.done == [3]
        assert came_in.wait(10)
        thread.join()
        while not steps.advance(mail)[1]:
            pass


def test_seconds_that_are_none_are_refused() -> None:
    for value in (-0.1, math.inf, math.nan, 60.1, "x", None):
        with pytest.raises(RequestError, match="run_ahead_s"):
            make_engine(run_ahead_s=value)


# The accounts of blocks that are allocated ahead.


def manager_of(windows: tuple[int, ...], sizes: tuple[int, ...], num_blocks: int) -> BlockManager:
    return BlockManager(make_layout(windows, sizes), num_blocks, chunk_tokens=32)


def test_trim_keeps_what_is_computed_or_asked_for() -> None:
    manager = manager_of((0, 5), (4, 2), 40)
    seq = manager.new_sequence(range(9))
    assert manager.allocate(seq, 9)
    manager.commit(seq, range(9), 9)
    free = manager.num_free
    assert manager.allocate_unused([(seq, 27)])
    assert seq.num_blocks == [7, 14] and manager.num_free == free - 4 - 9
    manager.trim(seq, 13)
    assert seq.num_blocks == [4, 7] and seq.capacity_tokens == 14
    manager.trim(seq, 0)
    assert seq.num_blocks == [3, 5] and manager.num_free == free
    manager.check_integrity([seq])
    assert manager.allocate(seq, 11)
    manager.check_integrity([seq])


def test_blocks_ahead_are_for_all_or_for_none_and_never_cached_ones() -> None:
    manager = manager_of((0,), (4,), 9)
    old = manager.new_sequence(range(8))
    manager.allocate(old, 8)
    manager.commit(old, range(8), 8)
    manager.free(old)  # two of the eight blocks stay findable
    first, second = manager.new_sequence([40]), manager.new_sequence([41])
    assert not manager.allocate_unused([(first, 16), (second, 12)])
    assert first.num_blocks == second.num_blocks == [0]
    assert manager.can_allocate(first, 28)
    assert manager.allocate_unused([(first, 16), (second, 8)])
    assert manager.stats.evictions == 0
    manager.check_integrity([first, second])
