"""One prompt, streamed and timed: what the terminal commands show while they generate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plait.engine.params import SamplingParams
from plait.errors import EngineError

if TYPE_CHECKING:
    from plait.engine.llm import LLM

TERMINAL_MAX_TOKENS = 256
# Where neither a flag nor the checkpoint names a temperature. SamplingParams' own 1.0 makes small models ramble.
TERMINAL_TEMPERATURE = 0.7


@dataclass
class Generation:
    """A stream of text and, once it has ended, what it took.

    Iterate over it for pieces of text; `close` (or leaving the loop and closing) aborts the request. Seconds: prefill_s
    until the first token, decode_s from there to the last. adapter: the name of a loaded one.
    """

    llm: LLM
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they come. Raises EngineError where the request failed."""
        start = first = time.perf_counter()
        deltas = self.llm.stream({"prompt_token_ids": self.prompt_token_ids}, self.params, self.adapter)
        try:
            for delta in deltas:
                now = time.perf_counter()
                if delta.token_ids and not self.token_ids:
                    first, self.prefill_s = now, now - start
                self.decode_s = now - first
                self.token_ids += delta.token_ids
                self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
                self.pieces.append(delta.text)
                self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
                if delta.error is not None:
                    raise EngineError(f"the request failed: {delta.error}")
                if delta.text:
                    yield delta.text
        finally:
            deltas.close()  # type: ignore[attr-defined]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens that were computed, per second until the first output token."""
        return _rate(len(self.prompt_token_ids) - self.num_cached_tokens, self.prefill_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, per second; None where there are none."""
        return _rate(len(self.token_ids) - 1, self.decode_s)

    def speed_line(self) -> str:
        """For people: both speeds, apart."""
        computed = len(self.prompt_token_ids) - self.num_cached_tokens
        cached = f" (+ {self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        line = f"prefill {computed} tokens{cached}, {_shown(self.prefill_tokens_per_s)}"
        return f"{line}; decode {len(self.token_ids)} tokens, {_shown(self.decode_tokens_per_s)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": len(self.prompt_token_ids),
            "cached_tokens": self.num_cached_tokens,
            "completion_tokens": len(self.token_ids),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }


def terminal_params(llm: LLM, **given: Any) -> SamplingParams:
    """Sampling of the terminal commands: what was given (not None), then the checkpoint's defaults, then ours."""
    ours = {"max_tokens": TERMINAL_MAX_TOKENS, "temperature": TERMINAL_TEMPERATURE}
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**ours, **llm.bundle.default_params, **chosen})


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f} tokens/s"
