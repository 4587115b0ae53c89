"""The step loop: requests in, tokens out, over an executor that computes and a block manager that accounts."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from plait.engine.adapters import unknown_adapter
from plait.engine.admission import Limits, check_request, longest_sequence, total_tokens
from plait.engine.batch import Batch, build_batch
from plait.engine.embed import Pooled
from plait.engine.executor import Executor, StepResult
from plait.engine.request import Request, RequestState, SequenceState
from plait.engine.sampler import NOT_FINITE, Sampler
from plait.engine.sampling_state import SamplingState
from plait.engine.scheduler import Scheduler
from plait.engine.stats import EngineStats, TouchedBytes
from plait.engine.steady_steps import SteadySteps
from plait.engine.token_output import RequestTiming, TokenLogprobs, TokenOutput
from plait.engine.tokens import TokenBuffer
from plait.errors import CapacityError, EngineError, RequestError
from plait.memory.blocks import BlockManager

NO_HIDDEN = "this executor gives no hidden states, which embeddings need"
MAX_RUN_AHEAD_S = 60
_MAX_FAILED_STEPS = 3
_STEP_TIMES = 4096


class _Choice(NamedTuple):
    """What was sampled for a sequence: a token, or why there is none."""

    seq: SequenceState
    token: int
    error: str | None
    logprobs: TokenLogprobs | None


class Engine:
    """Serves many requests at once with one executor. Not thread-safe: one thread calls it.

    max_model_len: tokens of prompt and output together. max_num_seqs: sequences in one step.
    max_batched_tokens: tokens of one step (at most the executor's). policy: "fcfs" or "priority".
    eos_token_ids: the model's end tokens. max_logprobs: bound of logprobs and prompt_logprobs. max_prompt_rows: logits
    rows per step for prompt_logprobs. seed: makes the seeds that requests without one get repeatable.
    run_ahead_s: while all sequences decode greedily, one step() may make several steps, and begins no more of them when
    so many seconds have passed; until it returns nobody is admitted, aborted or heard of. 0: one step at a time.
    adapters: names of those that the executor has, in the order of their numbers 1, 2, ... in steps, and the hashes of
    their contents.
    step_times: of the latest steps, (seconds, seconds of them in which the executor and the native sampler computed);
    steps that were made together share theirs evenly.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_model_len: int,
        max_num_seqs: int = 32,
        max_batched_tokens: int = 512,
        policy: str = "fcfs",
        eos_token_ids: Iterable[int] = (),
        prefix_caching: bool = True,
        max_logprobs: int = 20,
        max_prompt_rows: int = 256,
        seed: int | None = None,
        run_ahead_s: float = 0.04,
        short_rope_tokens: int = 0,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        if policy not in ("fcfs", "priority"):
            raise RequestError(f"policy must be 'fcfs' or 'priority', got {policy!r}", field="policy")
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_model_len", max_model_len),
            ("max_batched_tokens", max_batched_tokens),
            ("max_prompt_rows", max_prompt_rows),
        ):
            if value < 1:
                raise RequestError(f"{name} must be at least 1, got {value}", field=name)
        if not isinstance(run_ahead_s, (int, float)) or not 0 <= run_ahead_s <= MAX_RUN_AHEAD_S:
            raise RequestError(
                f"run_ahead_s must be seconds, 0 to {MAX_RUN_AHEAD_S}, got {run_ahead_s!r}", field="run_ahead_s"
            )
        budget = min(max_batched_tokens, executor.max_batched_tokens)
        if budget < max_num_seqs:
            raise RequestError(
                f"a step of {budget} tokens cannot hold one token of each of {max_num_seqs} sequences: "
                "raise max_batched_tokens or lower max_num_seqs",
                field="max_batched_tokens",
            )
        self.executor = executor
        self.policy = policy
        self.eos_token_ids = frozenset(eos_token_ids)
        self.short_rope_tokens = short_rope_tokens
        self.adapters = dict(adapters or {})
        self._adapter_numbers = {name: number for number, name in enumerate(self.adapters, 1)}
        self.blocks = BlockManager(executor.layout, executor.num_blocks, prefix_caching, chunk_tokens=budget)
        self.scheduler = Scheduler(self.blocks, max_num_seqs, budget, max_prompt_rows)
        sampled_ids = executor.sampled_ids
        self.sampler = Sampler(sampled_ids)
        pool_tokens = longest_sequence(self.blocks, max_model_len)
        self.limits = Limits(
            executor.vocab_size, sampled_ids, max_model_len, pool_tokens, max_logprobs, self.eos_token_ids
        )
        self._seeds = np.random.default_rng(seed)
        self._requests: dict[str, RequestState] = {}
        self._arrivals = 0
        self._failed_steps = 0
        self._weights_version = 0
        self._steady = SteadySteps(self.scheduler, self.blocks, self.sampler, run_ahead_s, self._end_if_due)
        self.step_times: deque[tuple[float, float]] = deque(maxlen=_STEP_TIMES)
        self._executed = 0  # steps, failed ones too
        self._compute_s = 0.0  # of the present step
        self._step_s = self._total_compute_s = 0.0
        self._generated_tokens = 0
        self._totals: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._touched = TouchedBytes(getattr(executor, "touched_bytes", None))

    # Requests

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError or CapacityError, and then nothing has changed."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use: choose another", field="request_id")
        check_request(request, self.limits)
        if request.adapter is not None and (
            not isinstance(request.adapter, str) or request.adapter not in self.adapters
        ):
            raise unknown_adapter(request.adapter, self.adapters)
        if request.pooling is not None:
            self._prepare_hidden()
        params = request.params
        num_prompt = len(request.prompt_token_ids)
        total = total_tokens(num_prompt, params.max_tokens if request.pooling is None else 0, self.limits)
        seed = int(self._seeds.integers(1 << 64, dtype=np.uint64)) if params.seed is None else params.seed % (1 << 64)
        owner = RequestState(
            request,
            seed,
            end_ids=self.eos_token_ids | request.eos_token_ids,
            max_total_tokens=total,
            long_rope=0 < self.short_rope_tokens < total,
            adapter=0 if request.adapter is None else self._adapter_numbers[request.adapter],
            adapter_hash="" if request.adapter is None else self.adapters[request.adapter],
            order=self._arrivals,
            timing=RequestTiming(time.monotonic() if request.arrival_s is None else request.arrival_s),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            pooled=None if request.pooling is None else Pooled(request.pooling),
        )
        first = self._new_sequence(owner, 0, TokenBuffer(request.prompt_token_ids))
        self._arrivals += 1
        self._requests[request.request_id] = owner
        self._totals["prompt_tokens"] += num_prompt
        self.scheduler.wait(first)

    def _prepare_hidden(self) -> None:
        """Have the executor make what hidden states need, now: a failure concerns this request, not those of a step."""
        prepare = getattr(self.executor, "prepare_hidden", None)
        try:
            if prepare is not None:
                prepare()
        except (EngineError, MemoryError) as error:
            raise CapacityError(f"embeddings need buffers of their own, which cannot be made: {error}") from error

    def abort(self, request_id: str) -> list[TokenOutput]:
        """Drop a request and free its blocks at once; the last outputs of its unfinished choices. Unknown ids: none."""
        owner = self._requests.get(request_id)
        if owner is None:
            return []
        return [self._finish(owner, i, TokenOutput(request_id, i), "abort") for i in self._unfinished(owner)]

    def stop(self, request_id: str, index: int = 0) -> None:
        """End one choice because the caller found a stop string in its text; no effect if it has ended already."""
        owner = self._requests.get(request_id)
        if owner is not None and index in owner.choices:
            self._finish(owner, index, TokenOutput(request_id, index), "stop")

    def interrupt(self) -> None:
        """Let a step() that makes several steps end with the one it is in: there is news. From any thread.

        If none runs, the next one does not run ahead.
        """
        interrupt = getattr(self.executor, "interrupt", None)
        if interrupt is not None:
            interrupt()

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id has unfinished choices."""
        return request_id in self._requests

    def has_unfinished(self) -> bool:
        """Whether step() has anything to do."""
        return bool(self._requests)

    def refresh(self) -> None:
        """The weights have changed: drop every key and value; running requests are computed anew and go on."""
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)
        self._weights_version += 1
        self.blocks.set_weights_version(self._weights_version)
        take_weights = getattr(self.executor, "refresh", None)
        if take_weights is not None:  # a native plan packs them anew
            take_weights()
        for owner in self._requests.values():
            if owner.missing_prompt_rows:
                owner.prompt_logprobs = [None]
            if owner.request.pooling is not None:
                owner.pooled = Pooled(owner.request.pooling)

    # The step

    def step(self) -> list[TokenOutput]:
        """Compute one step, or several greedy ones, and return what came of it: at most one output per choice.

        A failure of one request ends that request, one of the whole step all requests that are in it, with
        finish_reason "error". Raises EngineError when the executor fails in several steps in a row: then the engine
        cannot go on.
        """
        start, executed = time.perf_counter(), self._executed
        self._compute_s = 0.0
        sampled_s = self.sampler.compute_s
        outputs = self._step_steady()
        if outputs is None:
            outputs = self._step_scheduled()
        if steps := self._executed - executed:
            compute_s = self._compute_s + self.sampler.compute_s - sampled_s
            step_s = time.perf_counter() - start
            self.step_times.extend([(step_s / steps, compute_s / steps)] * steps)
            self._step_s += step_s
            self._total_compute_s += compute_s
        return outputs

    def _step_scheduled(self) -> list[TokenOutput]:
        """A step as the scheduler makes it."""
        counts = self.scheduler.schedule()
        if not counts and self._requests:
            # Blocks that queued copies were to be read from become free only when the copies are taken.
            self.blocks.take_copies()
            counts = self.scheduler.schedule()
            if not counts:
                return self._give_up_on_first()
        if not counts:
            return []
        batch = build_batch(counts, self.blocks)
        now = time.monotonic()
        for seq in counts:
            if seq.owner.timing.first_scheduled_s is None:
                seq.owner.timing.first_scheduled_s = now
                self._totals["prefix_query_tokens"] += len(seq.tokens)
                self._totals["prefix_hit_tokens"] += seq.owner.num_cached_tokens or 0
        needs_logits = bool(batch.prompt_rows) or not all(s.sampling.greedy_as_is for s, _ in batch.sample_rows)
        return self._run(batch, needs_logits, self._digest)

    def _run(
        self,
        batch: Batch,
        needs_logits: bool,
        digest: Callable[[Batch, StepResult, list[TokenOutput]], None],
        steps: int = 1,
    ) -> list[TokenOutput]:
        """Execute and digest; failures are confined to the requests of this step."""
        executed = self._executed
        try:
            result = self._execute(batch, needs_logits, steps)
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise EngineError(f"{self._failed_steps} steps in a row failed, the last with: {error}") from error
            return self._fail_step(batch, error)
        self._failed_steps = 0
        done = self._executed - executed
        self._totals["steps"] += done
        self._totals["computed_tokens"] += done * len(batch.token_ids)
        outputs: list[TokenOutput] = []
        try:
            digest(batch, result, outputs)
        except Exception as error:  # choices that have ended by now keep their outputs
            outputs += self._fail_step(batch, error)
        return outputs

    def _execute(self, batch: Batch, needs_logits: bool, steps: int) -> StepResult:
        """One step, or up to `steps` in a row."""
        self._executed += 1
        start = time.perf_counter()
        if steps > 1:
            result = self._steady.run_ahead(self.executor, batch, steps)
            self._executed += result.best_ids.size // len(batch.token_ids) - 1
        else:
            hidden = bool(batch.hidden_rows)
            result = self.executor.execute(batch.token_ids, batch.inputs, logits=needs_logits, hidden=hidden)
        own = getattr(self.executor, "compute_s", None)
        self._compute_s = time.perf_counter() - start if own is None else own
        if steps > 1:
            return result
        rows, columns = len(batch.inputs.logit_rows), self.executor.vocab_size
        if len(result.best_ids) != rows or len(result.best_values) != rows:
            raise EngineError(f"the executor returned {len(result.best_ids)} best ids for {rows} rows")
        if needs_logits and (result.logits is None or result.logits.shape != (rows, columns)):
            shape = None if result.logits is None else result.logits.shape
            raise EngineError(f"the executor returned logits {shape}, expected {(rows, columns)}")
        return result

    def _step_steady(self) -> list[TokenOutput] | None:
        """A step, or several in a row, in which all sequences just decode; None where the scheduler has to decide."""
        prepared = self._steady.prepare(self.executor)
        if prepared is None:
            return None
        batch, needs_logits, steps = prepared
        executed = self._executed
        outputs = self._run(batch, needs_logits, self._digest_steady, steps)
        self._steady.step_s = self._compute_s / (self._executed - executed)
        return outputs

    def _digest_steady(self, batch: Batch, result: StepResult, outputs: list[TokenOutput]) -> None:
        """What _digest does, the short way."""
        if self._steady.digest(result, outputs):
            self._generated_tokens += sum(len(output.token_ids) for output in outputs)
        else:
            self._digest(batch, result, outputs)

    def _digest(self, batch: Batch, result: StepResult, outputs: list[TokenOutput]) -> None:
        """Sample, commit what was computed, and add what is new to `outputs`."""
        broken = self._collect_prompt_logprobs(batch, result) | self._collect_hidden(batch, result)
        choices = self._sample([(seq, row) for seq, row in batch.sample_rows if seq not in broken], result)
        for seq, count in batch.counts.items():
            first = choices.get(seq)
            if seq in broken:
                outputs += self._end_in_error(seq.owner, broken[seq])
                continue
            if first is None or first[0].error is None:
                self.blocks.commit(seq.held, seq.tokens.array, seq.num_computed + count)
            if first is not None:
                self._append(seq, first, outputs)
            elif seq.remaining == 0:  # scoring and pooling: nothing to sample
                outputs += self._end_without_tokens(seq.owner)

    def _sample(
        self, sample_rows: list[tuple[SequenceState, int]], result: StepResult
    ) -> dict[SequenceState, list[_Choice]]:
        """What was chosen per scheduled sequence: its own token first, then those of choices that begin with it."""
        if not sample_rows:
            return {}
        groups: list[list[SequenceState]] = []
        for seq, _ in sample_rows:
            owner, group = seq.owner, [seq]
            if not owner.forked:
                prompt = owner.request.prompt_token_ids
                group += [self._new_sequence(owner, i, TokenBuffer(prompt)) for i in range(1, owner.request.params.n)]
                owner.forked = True
            groups.append(group)
        rows = [row for (_, row), group in zip(sample_rows, groups, strict=True) for _ in group]
        seqs = [seq for group in groups for seq in group]
        samples = self.sampler.sample(result, rows, [seq.sampling for seq in seqs])
        choices = iter(
            _Choice(seq, token, samples.errors.get(i), samples.logprobs.get(i))
            for i, (seq, token) in enumerate(zip(seqs, samples.token_ids, strict=True))
        )
        return {group[0]: [next(choices) for _ in group] for group in groups}

    def _append(self, leader: SequenceState, choices: list[_Choice], outputs: list[TokenOutput]) -> None:
        """Add each token to its choice; choices that begin here get the leader's blocks. The leader itself goes last,
        because its end frees the blocks that the others fork."""
        start = len(outputs)
        for choice in choices[1:] + choices[:1]:
            seq, owner = choice.seq, choice.seq.owner
            output = TokenOutput(owner.request.request_id, seq.index, num_cached_tokens=owner.num_cached_tokens or 0)
            if choice.error is None:
                seq.tokens.append(choice.token)
                seq.sampling.observe(choice.token)
                self._generated_tokens += 1
                output.token_ids = [choice.token]
                output.logprobs = None if choice.logprobs is None else [choice.logprobs]
                reason, stop_reason = self._finish_reason(seq, choice.token)
                output.stop_reason = stop_reason
            else:
                output.error = choice.error
                reason = "error"
            if owner.timing.first_token_s is None:
                owner.timing.first_token_s = time.monotonic()
            if seq is not leader and reason is None:
                self._start_fork(seq, leader)
            outputs.append(output if reason is None else self._finish(owner, seq.index, output, reason))
        outputs[start:] = sorted(outputs[start:], key=lambda o: o.index)
        owner = leader.owner
        if owner.prompt_logprobs is not None:
            outputs[start].prompt_logprobs, owner.prompt_logprobs = owner.prompt_logprobs, None

    def _start_fork(self, seq: SequenceState, leader: SequenceState) -> None:
        if len(self.scheduler.running) < self.scheduler.max_num_seqs:
            seq.blocks = self.blocks.fork(leader.held)
            self.scheduler.run(seq)
        else:  # it is computed later, mostly from the prefix cache
            self.scheduler.wait(seq)

    def _end_if_due(self, seq: SequenceState, output: TokenOutput) -> None:
        """End a choice whose newest token, the last of `output`, ends it."""
        reason, output.stop_reason = self._finish_reason(seq, output.token_ids[-1])
        if reason is not None:
            self._finish(seq.owner, seq.index, output, reason)

    def _finish_reason(self, seq: SequenceState, token: int) -> tuple[str | None, int | None]:
        owner, params = seq.owner, seq.owner.request.params
        if seq.num_output >= params.min_tokens:
            if token in owner.end_ids and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        return ("length" if len(seq.tokens) >= owner.max_total_tokens else None), None

    def _end_without_tokens(self, owner: RequestState) -> list[TokenOutput]:
        request = owner.request
        outputs = []
        for index in range(request.params.n):
            output = TokenOutput(request.request_id, index, num_cached_tokens=owner.num_cached_tokens or 0)
            outputs.append(self._finish(owner, index, output, "length"))
        outputs[0].prompt_logprobs = owner.prompt_logprobs
        if owner.pooled is not None:
            outputs[0].embedding = owner.pooled.vector().tolist()
        return outputs

    def _collect_hidden(self, batch: Batch, result: StepResult) -> dict[SequenceState, str]:
        """Pool what this step has of hidden states; the sequences for which there are none, and why."""
        broken = {}
        for seq, start in batch.hidden_rows:
            if result.hidden is None:
                broken[seq] = NO_HIDDEN
                continue
            hidden = result.hidden[start : start + batch.counts[seq]]
            assert seq.owner.pooled is not None
            seq.owner.pooled.take(seq.num_computed, hidden)
            if not np.isfinite(hidden).all():
                broken[seq] = NOT_FINITE
        return broken

    def _collect_prompt_logprobs(self, batch: Batch, result: StepResult) -> dict[SequenceState, str]:
        """Take what this step has of them; the sequences whose logits are not finite, and that in words."""
        broken = {}
        for seq, row, positions in batch.prompt_rows:
            owner = seq.owner
            count = owner.request.params.prompt_logprobs
            assert owner.prompt_logprobs is not None and count is not None
            targets = seq.tokens.array[positions.start + 1 : positions.stop + 1].tolist()
            for i, target in enumerate(targets):
                assert result.logits is not None
                entry = self.sampler.logprobs(result.logits[row + i], target, count)
                owner.prompt_logprobs.append(entry)
                if math.isnan(entry.logprob):
                    broken[seq] = NOT_FINITE
        return broken

    # Ends and failures

    def _finish(self, owner: RequestState, index: int, output: TokenOutput, reason: str) -> TokenOutput:
        seq = owner.choices.pop(index, None)
        if seq is not None and (seq.blocks is not None or seq in self.scheduler.waiting):
            # Keys and values that gave such logits must not be found by anybody else.
            self.scheduler.remove(seq, forget=output.error == NOT_FINITE)
        self._finished[reason] += 1
        if not owner.choices:
            self._requests.pop(owner.request.request_id, None)
        owner.timing.finished_s = time.monotonic()
        output.finish_reason = reason
        output.num_cached_tokens = owner.num_cached_tokens or 0
        output.timing = owner.timing
        return output

    def _fail_step(self, batch: Batch, error: Exception) -> list[TokenOutput]:
        message = f"the step failed: {type(error).__name__}: {error}"
        owners = dict.fromkeys(seq.owner for seq in batch.counts)
        return [o for owner in owners for o in self._end_in_error(owner, message)]

    def _give_up_on_first(self) -> list[TokenOutput]:
        """Nothing can be scheduled although requests wait: a fault, but only the first one pays for it."""
        queue = self.scheduler.waiting or self.scheduler.running
        if not queue:
            raise EngineError("the engine holds requests that are in no queue")
        return self._end_in_error(queue[0].owner, "the request cannot be scheduled in an empty pool")

    def _unfinished(self, owner: RequestState) -> list[int]:
        """Choices that have not ended, whether they exist yet or not."""
        if self._requests.get(owner.request.request_id) is not owner:
            return []
        return list(owner.choices) if owner.forked else list(range(owner.request.params.n))

    def _end_in_error(self, owner: RequestState, message: str) -> list[TokenOutput]:
        """End every choice of a request: one that would be left over might never be scheduled again."""
        indices = self._unfinished(owner)
        outputs = [TokenOutput(owner.request.request_id, i, error=message) for i in indices]
        return [self._finish(owner, output.index, output, "error") for output in outputs]

    # State

    def _new_sequence(self, owner: RequestState, index: int, tokens: TokenBuffer) -> SequenceState:
        request = owner.request
        priority = request.priority if self.policy == "priority" else 0
        sampling = SamplingState(
            request.params,
            tokens,
            owner.num_prompt,
            owner.seed,
            index,
            owner.end_ids | frozenset(request.params.stop_token_ids),
            self.limits.sampled_ids,
        )
        seq = SequenceState(owner, index, tokens, sampling, (priority, owner.order, index))
        owner.choices[index] = seq
        return seq

    def stats(self) -> EngineStats:
        """Counters and gauges, cheap enough for every step."""
        totals, blocks = self._totals, self.blocks.stats
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_usage=self.blocks.usage,
            num_free_blocks=self.blocks.num_free,
            num_blocks=self.executor.num_blocks,
            steps=totals["steps"],
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens=totals["prompt_tokens"],
            generated_tokens=self._generated_tokens,
            computed_tokens=totals["computed_tokens"],
            prefix_query_tokens=totals["prefix_query_tokens"],
            prefix_hit_tokens=totals["prefix_hit_tokens"],
            recycled_blocks=blocks.recycled_blocks,
            cow_copies=blocks.cow_copies,
            evictions=blocks.evictions,
            kv_touched_bytes=self._touched.read(),
            finished=dict(self._finished),
            step_s=self._step_s,
            compute_s=self._total_compute_s,
        )

    def check_integrity(self) -> None:
        """Raise EngineError where blocks, queues and requests disagree. Time grows with the pool."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.blocks.check_integrity([seq.held for seq in running])
        if any(seq.blocks is not None for seq in waiting):
            raise EngineError("a waiting sequence holds blocks")
        queued = {id(seq) for seq in running + waiting}
        owned = {id(seq) for owner in self._requests.values() for seq in owner.choices.values()}
        if queued != owned or len(queued) != len(running) + len(waiting):
            raise EngineError(f"{len(queued)} sequences are queued, but the requests have {len(owned)}")
        if not self._requests and self.blocks.usage:
            raise EngineError(f"no request is left, but {self.blocks.usage:.1%} of the pool is held")
