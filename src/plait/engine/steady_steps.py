"""The steps of a batch that only decodes: how many are made in one call, and what they have brought.

A greedy step says all of the next one, so an executor that can makes several of them before it returns, and what
surrounds a step is paid once for all. How long such a call may last is bounded: until it ends nobody is admitted,
nothing is aborted and no text is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from plait.engine.batch import Batch
from plait.engine.executor import StepResult
from plait.engine.request import SequenceState
from plait.engine.sampler import Sampler
from plait.engine.scheduler import Scheduler
from plait.engine.steady import SteadyBatch
from plait.engine.token_output import TokenLogprobs, TokenOutput
from plait.errors import EngineError
from plait.memory.blocks import BlockManager


def _just_decodes(seq: SequenceState) -> bool:
    """Whether all that the sequence needs from a step is its next token, and nobody shares the block it writes."""
    owner = seq.owner
    return (
        seq.remaining == 1
        and owner.timing.first_token_s is not None
        and owner.prompt_logprobs is None
        and owner.pooled is None
        and not seq.held.may_share
    )


class SteadySteps:
    """The short way of an engine's step while there is anything but decoding neither to do nor to decide.

    run_ahead_s: see Engine. end: called with a sequence whose newest token may be its last, and its output.
    step_s: seconds of computing of a recent step; the engine says.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        sampler: Sampler,
        run_ahead_s: float,
        end: Callable[[SequenceState, TokenOutput], None],
    ) -> None:
        self._scheduler = scheduler
        self._blocks = blocks
        self._sampler = sampler
        self._run_ahead_s = run_ahead_s
        self._end = end
        self._steady: SteadyBatch | None = None
        self._due = False  # steps that prepare() told of have brought nothing yet
        self.step_s = 0.0

    def prepare(self, executor: Any) -> tuple[Batch, bool, int] | None:
        """The next step with its blocks, whether it needs logits, and how many may be made in a row from it.

        None where the scheduler has to decide: somebody comes or goes, or blocks are too few.
        """
        if self._due and self._steady is not None:  # the steps before were interrupted: nobody knows what they did
            self._steady.give_back()
            self._steady = None
        steady = self._steady
        if steady is None or steady.version != self._scheduler.version:
            steady = self._steady = self._find()
        if steady is None:
            return None
        token_ids = steady.token_ids
        advanced = steady.advance(self._steps_at_once(steady, executor))
        if advanced is None:
            self._steady = None
            return None
        inputs, steps = advanced
        self._due = True
        return Batch(token_ids, inputs, steady.counts, [], steady.sample_rows, []), steady.needs_logits, steps

    def _find(self) -> SteadyBatch | None:
        """The batch that all steps have until a sequence comes or goes; None while there is anything but decoding."""
        running = self._scheduler.running
        if not running or self._scheduler.may_admit or not all(map(_just_decodes, running)):
            return None
        return SteadyBatch(running, self._blocks, self._scheduler.version)

    def _steps_at_once(self, steady: SteadyBatch, executor: Any) -> int:
        """As many as the time allows. Blocks are allocated for them, so a guess is better than the most."""
        if not self._run_ahead_s or steady.needs_logits:
            return 1
        # Windowed groups are sized for steps that add chunk_tokens.
        most = min(getattr(executor, "max_steps", 1), self._blocks.chunk_tokens)
        return min(most, int(self._run_ahead_s / self.step_s) + 1) if self.step_s > 0 else most

    def run_ahead(self, executor: Any, batch: Batch, steps: int) -> StepResult:
        """T >= 1 steps from `batch` on in one call: best_ids and best_values [T, R], or [R] where T is 1."""
        assert self._steady is not None
        ids, values = executor.execute_steps(
            batch.token_ids, batch.inputs, steps, self._run_ahead_s, self._steady.stop_ids
        )
        if ids.shape != values.shape or ids.shape[1:] != batch.token_ids.shape or not 1 <= len(ids) <= steps:
            raise EngineError(f"the executor returned ids {ids.shape} and values {values.shape} for {steps} steps")
        sound = np.isfinite(values).all(axis=1)
        if len(ids) == 1 or not sound[:2].all():
            return StepResult(ids[0], values[0])
        # A step that is not finite is made again, alone: so it ends as it would without those before it.
        done = len(ids) if sound.all() else int(sound.argmin())
        return StepResult(ids[:done], values[:done])

    def digest(self, result: StepResult, outputs: list[TokenOutput]) -> bool:
        """Add the outputs of the step or steps that prepare() told of; False, and no sequence has changed, where a row
        has no token."""
        steady = self._steady
        assert steady is not None
        self._due = False
        logprobs: dict[int, TokenLogprobs] = {}
        if steady.needs_logits:
            samples = self._sampler.sample(result, steady.rows, steady.states)
            tokens, sound, logprobs = np.array([samples.token_ids], np.int32), not samples.errors, samples.logprobs
        else:
            tokens, sound = np.atleast_2d(result.best_ids), bool(np.isfinite(result.best_values).all())
        if not sound:
            steady.give_back()
            return False
        for i, (seq, new) in enumerate(zip(steady.seqs, steady.take(tokens), strict=True)):
            owner = seq.owner
            output = TokenOutput(owner.request.request_id, seq.index, new)
            output.num_cached_tokens = owner.num_cached_tokens or 0
            if i in logprobs:
                output.logprobs = [logprobs[i]]
            # Steps in a row end with the first token that may end anybody, and with the end of the shortest sequence.
            if new[-1] in owner.ends or len(seq.tokens) >= owner.max_total_tokens:
                self._end(seq, output)
            outputs.append(output)
        return True
