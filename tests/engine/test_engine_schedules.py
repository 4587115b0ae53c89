"""Whatever is scheduled, chunked, preempted, shared, forked, recycled or aborted, each request gets its own tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from plait.engine.engine import Engine
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from tests.engine.toy_model import ToyExecutor, generate_alone, logits_without_cache, tokens_of

SHAPES = [
    {"windows": (0,), "block_tokens": (4,)},
    {"windows": (0, 6), "block_tokens": (4, 4)},
    {"windows": (5, 0, 9), "block_tokens": (4, 8, 4)},
    {"windows": (7,), "block_tokens": (2,)},
]
COUNTED = (
    "choices",
    "preemptions",
    "prefix_hit_tokens",
    "recycled_blocks",
    "cow_copies",
    "evictions",
    "aborts",
    "refreshes",
    "chunked prompts",
)


def random_params(rng: np.random.Generator) -> SamplingParams:
    greedy = rng.random() < 0.3
    return SamplingParams(
        n=int(rng.choice([1, 1, 2, 4])),
        temperature=0.0 if greedy else float(rng.uniform(0.3, 1.5)),
        top_p=float(rng.choice([1.0, 0.9])),
        top_k=int(rng.choice([0, 5])),
        seed=int(rng.integers(1 << 40)),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        max_tokens=int(rng.integers(1, 14)),
        min_tokens=int(rng.choice([0, 1])),
        stop_token_ids=[int(rng.integers(50))],
        logprobs=int(rng.choice([0, 2])) if rng.random() < 0.3 else None,
        prompt_logprobs=1 if rng.random() < 0.2 else None,
    )


def one_schedule(seed: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    budget = int(rng.integers(6, 20))
    executor = ToyExecutor(num_blocks=int(rng.integers(26, 60)), max_batched_tokens=budget, **SHAPES[seed % 4])
    engine = Engine(
        executor,
        max_model_len=40,
        max_num_seqs=int(rng.integers(2, 7)),
        policy="priority" if seed % 3 == 0 else "fcfs",
        eos_token_ids=[7],
        prefix_caching=seed % 5 != 0,
        max_prompt_rows=int(rng.integers(1, 9)),
    )
    stems = [rng.integers(0, 50, 20).tolist() for _ in range(2)]
    requests: dict[str, Request] = {}
    for i in range(int(rng.integers(3, 9))):
        stem = stems[int(rng.integers(2))][: int(rng.integers(0, 21))]
        prompt = stem + rng.integers(0, 50, int(rng.integers(1, 7))).tolist()
        salt = "other" if rng.random() < 0.1 else None
        requests[f"r{i}"] = Request(f"r{i}", prompt, random_params(rng), priority=int(rng.integers(3)), cache_salt=salt)
    waiting = list(requests.values())
    outputs: dict[tuple[str, int], list] = {}
    aborted: set[str] = set()
    events: Counter[str] = Counter()
    while waiting or engine.has_unfinished():
        if waiting and (rng.random() < 0.4 or not engine.has_unfinished()):
            engine.add_request(waiting.pop(0))
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        if rng.random() < 0.02 and (running := engine.scheduler.running):
            victim = running[int(rng.integers(len(running)))].owner.request.request_id
            for output in engine.abort(victim):
                outputs.setdefault((output.request_id, output.index), []).append(output)
            aborted.add(victim)
        if rng.random() < 0.01:
            engine.refresh()
            events["refreshes"] += 1
        engine.check_integrity()
    assert engine.blocks.usage == 0
    for request in requests.values():
        for choice in range(request.params.n):
            got = outputs[request.request_id, choice]
            expected, reason = generate_alone(
                executor, request.prompt_token_ids, request.params, frozenset([7]), choice, max_total=40
            )
            if got[-1].finish_reason == "abort":
                assert request.request_id in aborted
                assert tokens_of(got) == expected[: len(tokens_of(got))]
                events["aborts"] += 1
                continue
            assert (tokens_of(got), got[-1].finish_reason) == (expected, reason), (request.request_id, choice)
            assert all(o.finish_reason is None for o in got[:-1])
            check_logprobs(executor, request, got, choice)
            events["choices"] += 1
    stats = engine.stats()
    for name in ("preemptions", "prefix_hit_tokens", "recycled_blocks", "cow_copies", "evictions"):
        events[name] += getattr(stats, name)
    events["chunked prompts"] += any(len(r.prompt_token_ids) > budget for r in requests.values())
    return events


def check_logprobs(executor: ToyExecutor, request: Request, outputs: list, choice: int) -> None:
    ids = list(request.prompt_token_ids) + tokens_of(outputs)
    logits = logits_without_cache(executor, np.array(ids)).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    if request.params.prompt_logprobs is not None and choice == 0:
        entries = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(entries) == 1
        assert entries[0][0] is None and len(entries[0]) == len(request.prompt_token_ids)
        for i, entry in enumerate(entries[0][1:]):
            assert entry.token_id == ids[i + 1]
            assert entry.logprob == pytest.approx(logprobs[i, ids[i + 1]], abs=1e-5)
    if request.params.logprobs is not None:
        entries = [e for o in outputs for e in o.logprobs]
        first = len(request.prompt_token_ids)
        for i, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(logprobs[first + i - 1, ids[first + i]], abs=1e-5)


def run_schedules(schedule: Callable[[int], Counter[str]], seeds: range, counted: Iterable[str]) -> None:
    """Every schedule, and all that is counted has happened at least once."""
    events: Counter[str] = Counter()
    for seed in seeds:
        events += schedule(seed)
    print(dict(events))
    for name in counted:
        assert events[name] > 0, name


def test_random_schedules_give_every_request_the_tokens_it_gets_alone() -> None:
    run_schedules(one_schedule, range(30), COUNTED)


@pytest.mark.slow
def test_many_random_schedules_give_every_request_the_tokens_it_gets_alone() -> None:
    run_schedules(one_schedule, range(30, 330), COUNTED)


@pytest.mark.parametrize("when", range(1, 16))
def test_preemption_at_any_step_changes_nothing(when: int) -> None:
    executor = ToyExecutor(num_blocks=60)
    engine = Engine(executor, max_model_len=40, max_num_seqs=3)
    params = SamplingParams(seed=5, max_tokens=10, ignore_eos=True)
    prompts = [list(range(1, 12 + i)) for i in range(3)]
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), prompt, params))
    outputs: dict[str, list[int]] = {}
    step = 0
    while engine.has_unfinished():
        step += 1
        if step == when:
            for seq in list(engine.scheduler.running):
                engine.scheduler.preempt(seq)
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)] == generate_alone(executor, prompt, params)[0]


def test_a_tiny_pool_serves_three_requests_that_do_not_fit_together() -> None:
    # 6 blocks of 8 tokens; each request reaches 40 tokens, 5 blocks
    executor = ToyExecutor(num_blocks=7, windows=(0,), block_tokens=(8,))
    engine = Engine(executor, max_model_len=40, max_num_seqs=3)
    params = SamplingParams(temperature=0, max_tokens=34)
    prompts = [[i, 2, 3, 4, 5, 6] for i in range(3)]
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), prompt, params))
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    assert engine.stats().preemptions > 0
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)] == generate_alone(executor, prompt, params)[0]
