"""What the engine says about new tokens: plain data that crosses the process border."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TokenLogprobs:
    """One token under the raw distribution (log-softmax of the model's logits, before any processing).

    rank: 1 for the most likely token; equal logits rank by id. top: the k most likely (id, log-probability), best
    first, without regard to whether the token itself is among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class RequestTiming:
    """Seconds on the engine's monotonic clock; None where the request did not get so far."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class TokenOutput:
    """New tokens of one choice of one request after a step.

    token_ids: the new ones only. logprobs: one entry per new token, None when not asked for.
    prompt_logprobs: with the first output of the request that has them (first entry None: nothing precedes it).
    finish_reason: None while it goes on, else "stop", "length", "abort" or "error" (then `error` says what).
    stop_reason: the stop_token_ids entry that hit; None for the model's own end tokens.
    num_cached_tokens: prompt tokens that came from the prefix cache. timing: with the last output of a choice.
    embedding: the pooled hidden states [hidden size], of a request that asked for them.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    timing: RequestTiming | None = None
    embedding: list[float] | None = None
