"""One API call that generates: its requests in the engine, what has come of them, and what it used."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from plait.engine.admission import check_request, total_tokens
from plait.engine.outputs import ChoiceDelta
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from plait.server.errors import ApiError
from plait.server.prompts import Prompt
from plait.server.state import Served, ServerState


class Call:
    """Created when everything has been checked; `close` it in any case. Choice i of prompt p has index p * n + i.

    log: facts for the log line. model: the name that the client asked for, which may be an adapter's.
    """

    def __init__(
        self,
        state: ServerState,
        served: Served,
        call_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        log: dict[str, Any],
        cache_salt: str | None = None,
        model: str | None = None,
    ) -> None:
        self.id = call_id
        self.created = int(time.time())
        self.served = served
        self.params = params
        adapter = model if model in served.info.adapters else None
        self.model = adapter or served.id
        self.prompts = list(prompts)
        self._metrics = state.metrics
        self._log = log
        self._last_token_s: dict[int, float] = {}
        self._start_s = time.monotonic()
        self.num_completion_tokens = 0
        requests = [
            (Request(f"{call_id}-{i}", prompt.ids, params, cache_salt=cache_salt, adapter=adapter), prompt.text)
            for i, prompt in enumerate(self.prompts)
        ]
        limits = served.info.limits
        # The engine's own rules, applied here so that the answer is a status and not the end of a stream.
        for request, _ in requests:
            check_request(request, limits)
            total_tokens(len(request.prompt_token_ids), params.max_tokens, limits)
        state.check_queue(served, len(requests) * params.n)
        self._stream = state.client.submit(served.index, requests)
        log |= {"id": call_id, "model": self.model, "prompt_tokens": sum(len(p.ids) for p in self.prompts)}

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    async def deltas(self) -> AsyncIterator[tuple[int, ChoiceDelta]]:
        """(choice index, delta) as they come. Raises ApiError for a failure in the engine."""
        reasons: set[str] = set()
        async for batch in self._stream.batches():
            now = time.monotonic()
            for position, delta in batch:
                index = position * self.params.n + delta.index
                self._count(index, delta, now)
                if delta.finish_reason is not None:
                    reasons.add(delta.finish_reason)
                    self._log["finish"] = ",".join(sorted(reasons))
                if delta.finish_reason == "error":
                    raise ApiError(500, f"generation failed: {delta.error}", code="generation_failed")
                if delta.finish_reason == "abort":
                    raise ApiError(503, "the server is shutting down", code="draining")
                yield index, delta

    def _count(self, index: int, delta: ChoiceDelta, now: float) -> None:
        self.num_completion_tokens += len(delta.token_ids)
        if not delta.token_ids:
            return
        if not self._last_token_s:
            self._log["first_token_s"] = round(now - self._start_s, 3)
        last = self._last_token_s.get(index)
        if last is not None:
            histogram = self._metrics.inter_token.labels(self.served.id)
            for _ in delta.token_ids:  # those that came together share the time
                histogram.observe((now - last) / len(delta.token_ids))
        self._last_token_s[index] = now

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; prompts count once however many choices they have."""
        num_prompt = sum(len(prompt.ids) for prompt in self.prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    @property
    def _num_cached(self) -> int:
        return sum(result.num_cached_tokens for result in self._stream.results.values())

    def close(self) -> None:
        """Abort what still runs; account for what ended."""
        self._log["output_tokens"] = self.num_completion_tokens
        self._log["cached_tokens"] = self._num_cached
        if not self._stream.finished:
            self._log.setdefault("finish", "abort")
        for result in self._stream.results.values():
            self._metrics.request_ended(self.served.id, result.timing, len(result.prompt_token_ids), result.outputs)
        self._stream.close()
