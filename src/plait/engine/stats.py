"""What an engine tells about itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Of the engine's time, at most one part in so many goes into asking how much of the pool is touched.
_TOUCHED_COST = 100
_TOUCHED_INTERVAL_S = 1.0


@dataclass
class EngineStats:
    """A snapshot. Counters count from the start; prefix_* and *_tokens are tokens; kv_usage is 0 to 1.

    prefix_query_tokens, prefix_hit_tokens: prompt tokens of admitted requests, and those found in the prefix cache.
    generated_tokens: those too that came in one call with a stop string, behind it, and were dropped.
    computed_tokens: of prompts and outputs, recomputed ones too. finished: choices by finish_reason.
    kv_touched_bytes: of the reserved pool, what lies in memory; None where nobody can say. step_s, compute_s: seconds
    in steps, and those of them in which the executor and the native sampler computed; the rest is Python.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_free_blocks: int
    num_blocks: int
    steps: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    recycled_blocks: int
    cow_copies: int
    evictions: int
    kv_touched_bytes: int | None = None
    finished: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    compute_s: float = 0.0


class TouchedBytes:
    """How much of the pool lies in memory, asked anew at most once a second: the answer takes milliseconds.

    ask: the executor's `touched_bytes`; None for an executor that has none.
    """

    def __init__(self, ask: Callable[[], int | None] | None) -> None:
        self._ask = ask
        self._known: int | None = None
        self._next_s = 0.0

    def read(self) -> int | None:
        if self._ask is not None and (start := time.monotonic()) >= self._next_s:
            self._known = self._ask()
            end = time.monotonic()
            self._next_s = end + max(_TOUCHED_INTERVAL_S, _TOUCHED_COST * (end - start))
        return self._known
