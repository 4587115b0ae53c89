"""Which tokens the next step computes.

There is no prefill phase and no decode phase: every sequence has known tokens and computed tokens, and a
step spends one budget of tokens on closing the gaps. Sequences that lack one token (they decode) come
first, then other running ones, then waiting ones in order. When blocks run out, the running
sequence with the largest key (newest, or of lowest priority) gives up its blocks and is computed anew later.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from plait.engine.request import SequenceState
from plait.memory.blocks import BlockManager

_KEY = attrgetter("key")


class Scheduler:
    """Running and waiting sequences, both in order of their keys.

    max_prompt_rows: logits rows for prompt_logprobs that one step may ask for (bounds the size of the logits).
    """

    def __init__(
        self, manager: BlockManager, max_num_seqs: int, max_batched_tokens: int, max_prompt_rows: int = 256
    ) -> None:
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.max_prompt_rows = max_prompt_rows
        self.running: list[SequenceState] = []
        self.waiting: list[SequenceState] = []
        self.num_preemptions = 0
        self.version = 0  # another one whenever a sequence has come, gone or changed its queue
        # Free blocks when the first waiting sequence last found too few: no use in asking again with fewer.
        self._too_few: int | None = None

    def wait(self, seq: SequenceState) -> None:
        """Queue a sequence that has no blocks."""
        self.version += 1
        insort(self.waiting, seq, key=_KEY)
        self._too_few = None

    def run(self, seq: SequenceState) -> None:
        """Let a sequence that has blocks take part in the next steps."""
        self.version += 1
        insort(self.running, seq, key=_KEY)

    def remove(self, seq: SequenceState, forget: bool = False) -> None:
        """Drop a sequence and free its blocks at once. forget: what they hold leaves the prefix cache too."""
        self.version += 1
        if seq.blocks is None:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
            self._release(seq, forget)
        self._too_few = None

    def preempt(self, seq: SequenceState) -> None:
        """Take a running sequence's blocks; it waits, in its old place in the order, to be computed anew."""
        self.running.remove(seq)
        self._release(seq)
        self.wait(seq)
        self.num_preemptions += 1

    @property
    def may_admit(self) -> bool:
        """Whether there is somebody to admit, and a place for a sequence."""
        return bool(self.waiting) and len(self.running) < self.max_num_seqs

    def schedule(self) -> dict[SequenceState, int]:
        """Tokens to compute in the next step per sequence, all with blocks allocated; may be empty."""
        step = _Step(self.max_batched_tokens, self.max_prompt_rows)
        before = self.num_preemptions
        decodes = [seq for seq in self.running if seq.remaining == 1]
        others = [seq for seq in self.running if seq.remaining > 1]
        for seq in decodes + others:
            if seq.blocks is not None:  # not preempted for one of those before it
                self._continue(seq, step)
        if self.num_preemptions == before:
            while self.waiting and len(self.running) < self.max_num_seqs and self._admit(self.waiting[0], step):
                pass
        return step.tokens

    def _continue(self, seq: SequenceState, step: _Step) -> None:
        count = step.offer(seq)
        if count == 0:
            return
        while not self.manager.allocate(seq.held, seq.num_computed + count):
            victim = self.running[-1]
            step.withdraw(victim)
            self.preempt(victim)
            if victim is seq:
                return
        step.take(seq, count)

    def _admit(self, seq: SequenceState, step: _Step) -> bool:
        free = self.manager.num_free
        if step.budget == 0 or (self.running and self._too_few is not None and free <= self._too_few):
            return False
        owner = seq.owner
        collecting = len(owner.missing_prompt_rows) > 0 or owner.pooled is not None
        blocks = seq.blocks = self.manager.new_sequence(seq.tokens.array, owner.salt, use_cache=not collecting)
        count = step.offer(seq)
        # Room for all its tokens and the next one is asked for at once: half a prompt helps nobody.
        need = self.manager.layout.blocks_per_sequence(len(seq.tokens) + 1, self.manager.chunk_tokens)
        enough = need - int((blocks.table != 0).sum()) <= self.manager.num_free or not self.running
        if count == 0 or not enough or not self.manager.allocate(blocks, seq.num_computed + count):
            self._release(seq)
            if count:
                self._too_few = free
            return False
        self.waiting.pop(0)
        self.run(seq)
        step.take(seq, count)
        self._too_few = None
        if owner.num_cached_tokens is None:
            owner.num_cached_tokens = blocks.num_cached_tokens
        return True

    def _release(self, seq: SequenceState, forget: bool = False) -> None:
        self.manager.free(seq.held, forget)
        seq.blocks = None


class _Step:
    """The budgets of one step and what has been given out of them."""

    def __init__(self, budget: int, prompt_rows: int) -> None:
        self.budget = budget
        self.tokens: dict[SequenceState, int] = {}
        self._prompt_rows = prompt_rows

    def offer(self, seq: SequenceState) -> int:
        """Most tokens that the sequence may compute in this step."""
        count = min(seq.remaining, self.budget)
        if seq.owner.prompt_logprobs is not None and (missing := seq.owner.missing_prompt_rows):
            count = min(count, max(missing.start - seq.num_computed, 0) + self._prompt_rows)
        return count

    def take(self, seq: SequenceState, count: int) -> None:
        self.tokens[seq] = count
        self.budget -= count
        if seq.owner.prompt_logprobs is not None:
            self._prompt_rows -= len(prompt_rows(seq, count))

    def withdraw(self, seq: SequenceState) -> None:
        count = self.tokens.pop(seq, 0)
        self.budget += count
        if count:
            self._prompt_rows += len(prompt_rows(seq, count))


def prompt_rows(seq: SequenceState, count: int) -> range:
    """Positions of the next `count` tokens whose logits prompt_logprobs still needs."""
    missing = seq.owner.missing_prompt_rows
    first = max(missing.start, seq.num_computed)
    return range(first, max(first, min(missing.stop, seq.num_computed + count)))
