"""From the engine's tokens to what a caller reads: text, stop strings, and results with vLLM's field names.

This runs where the tokenizer is: in the calling process for `LLM`, in the HTTP process for the server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.engine.request import Request
from plait.engine.token_output import RequestTiming, TokenLogprobs, TokenOutput
from plait.errors import RequestError
from plait.text.detokenizer import IncrementalDetokenizer
from plait.text.stops import StopMatcher

if TYPE_CHECKING:
    from plait.text.tokenizer import Tokenizer

__all__ = [
    "ChoiceDelta",
    "CompletionOutput",
    "Logprob",
    "OutputProcessor",
    "ProcessedStep",
    "RequestOutput",
    "RequestTiming",
    "TokenLogprobs",
    "TokenOutput",
]


@dataclass
class Logprob:
    """Log-probability of a token under the raw distribution. rank: 1 is the most likely. decoded_token: its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobDict = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One choice. cumulative_logprob, logprobs: only where logprobs were asked for; one dictionary per token, the
    token itself first. finish_reason: "stop", "length", "abort", "error". stop_reason: the stop string or stop token
    id that hit, None for the model's own end. error: what went wrong, with finish_reason "error"."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request with its choices. prompt_logprobs: one dictionary per prompt token, None for the first.

    embedding: the pooled hidden states of a request that asked for them instead of tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    embedding: list[float] | None = None


@dataclass
class ChoiceDelta:
    """What a step added to one choice. Text may lag behind token_ids: an incomplete character, or the possible
    beginning of a stop string, is held back. Tokens after a stop string are not here."""

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0


@dataclass
class ProcessedStep:
    """deltas: in the order of the engine's outputs. to_stop: (request id, index) for which a stop string hit, to be
    passed to engine.stop(). finished: results of requests whose choices have all ended."""

    deltas: list[ChoiceDelta] = field(default_factory=list)
    to_stop: list[tuple[str, int]] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)


class OutputProcessor:
    """Keeps the text of every running request. tokenizer None: results have ids only."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestText] = {}

    def add_request(self, request: Request, prompt: str | None = None) -> None:
        """Begin a request; call it before its first output. prompt: its text, only to be handed back."""
        if self._tokenizer is None and request.params.stop:
            raise RequestError("stop strings need a tokenizer: use stop_token_ids", field="stop")
        self._requests[request.request_id] = _RequestText(request, prompt, self._tokenizer)

    def drop(self, request_id: str) -> None:
        """Forget a request that was aborted; later outputs of it are ignored."""
        self._requests.pop(request_id, None)

    def result(self, request_id: str) -> RequestOutput | None:
        """What a running request has so far."""
        text = self._requests.get(request_id)
        return None if text is None else text.result(self._tokenizer)

    def process(self, outputs: Iterable[TokenOutput]) -> ProcessedStep:
        """Take the outputs of a step; those of unknown requests and of choices that have ended are ignored."""
        step = ProcessedStep()
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None or output.index not in request.open:
                continue
            delta = request.take(output)
            step.deltas.append(delta)
            if delta.finish_reason is None:
                continue
            request.open.discard(output.index)
            if output.finish_reason is None:
                step.to_stop.append((output.request_id, output.index))
            if not request.open:
                del self._requests[output.request_id]
                step.finished.append(request.result(self._tokenizer))
        return step

    def logprob_dict(self, entry: TokenLogprobs) -> LogprobDict:
        """vLLM's form: the token itself first, then the k best."""
        return _logprob_dict(entry, self._tokenizer)


class _RequestText:
    """The choices of one request and what its results need. open: indices of unfinished choices."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.prompt = prompt
        self.open = set(range(request.params.n))
        self.choices = [_ChoiceText(i, request, tokenizer) for i in range(request.params.n)]
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_cached_tokens = 0
        self.timing: RequestTiming | None = None
        self.embedding: list[float] | None = None

    def take(self, output: TokenOutput) -> ChoiceDelta:
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.num_cached_tokens = output.num_cached_tokens
        self.timing = output.timing or self.timing
        self.embedding = output.embedding
        delta = self.choices[output.index].take(output)
        delta.prompt_logprobs = output.prompt_logprobs
        delta.num_cached_tokens = output.num_cached_tokens
        return delta

    def result(self, tokenizer: Tokenizer | None) -> RequestOutput:
        prompt_logprobs = None
        if self.prompt_logprobs is not None:
            prompt_logprobs = [None if e is None else _logprob_dict(e, tokenizer) for e in self.prompt_logprobs]
        return RequestOutput(
            self.request.request_id,
            self.prompt,
            [int(i) for i in self.request.prompt_token_ids],
            prompt_logprobs,
            [choice.result(tokenizer) for choice in self.choices],
            finished=not self.open,
            num_cached_tokens=self.num_cached_tokens,
            timing=self.timing,
            embedding=self.embedding,
        )


class _ChoiceText:
    """Token by token: detokenise, look for stops, keep what has been said."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._params = params
        self._output = CompletionOutput(index)
        self._entries: list[TokenLogprobs] = []
        self._pieces: list[str] = []
        self._request_id = request.request_id
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._detokenizer: IncrementalDetokenizer | None = None
        # A special token's text never reaches the matcher when it is skipped: such stops are matched by id.
        self._special_stops: dict[int, str] = {}
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            if params.skip_special_tokens and params.stop:
                ids = {stop: tokenizer.special_token_id(stop) for stop in params.stop}
                self._special_stops = {i: stop for stop, i in ids.items() if i is not None}

    def take(self, output: TokenOutput) -> ChoiceDelta:
        delta = ChoiceDelta(self._request_id, self._output.index, logprobs=None if output.logprobs is None else [])
        text: list[str] = []
        for i, token in enumerate(output.token_ids):
            delta.token_ids.append(token)
            self._output.token_ids.append(token)
            if output.logprobs is not None and delta.logprobs is not None:
                delta.logprobs.append(output.logprobs[i])
                self._entries.append(output.logprobs[i])
            ended = output.finish_reason == "stop" and i == len(output.token_ids) - 1
            hit = self._push(token, ended, text)
            if hit is not None:
                delta.finish_reason, delta.stop_reason = "stop", hit
                break
        else:
            if output.finish_reason is not None:
                delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
                delta.error = output.error
                hit = self._flush(text)
                if hit is not None:
                    delta.finish_reason, delta.stop_reason = "stop", hit
        delta.text = "".join(text)
        self._pieces.append(delta.text)
        self._output.finish_reason = delta.finish_reason
        self._output.stop_reason = delta.stop_reason
        self._output.error = delta.error
        return delta

    def _push(self, token: int, ended: bool, text: list[str]) -> str | None:
        """Add a token's text; the stop that hit. ended: the token is an end or stop token, whose text is left out."""
        if self._detokenizer is None:
            return None
        may_stop = len(self._output.token_ids) > self._params.min_tokens
        if may_stop and token in self._special_stops:
            stop = self._special_stops[token]
            earlier = self._flush(text)
            if earlier is not None:
                return earlier
            if self._params.include_stop_str_in_output:
                text.append(stop)
            return stop
        if ended and not self._params.include_stop_str_in_output:
            return None
        return self._match(self._detokenizer.push([token]), text, may_stop)

    def _match(self, piece: str, text: list[str], may_stop: bool = True) -> str | None:
        if not may_stop:
            text.append(piece)
            return None
        emit, hit = self._matcher.push(piece)
        text.append(emit)
        return hit

    def _flush(self, text: list[str]) -> str | None:
        if self._detokenizer is None:
            return None
        hit = self._match(self._detokenizer.flush(), text)
        if hit is None:
            text.append(self._matcher.flush())
        return hit

    def result(self, tokenizer: Tokenizer | None) -> CompletionOutput:
        output = self._output
        output.text = "".join(self._pieces)
        if self._params.logprobs is not None:
            output.logprobs = [_logprob_dict(entry, tokenizer) for entry in self._entries]
            output.cumulative_logprob = float(sum(entry.logprob for entry in self._entries))
        return output


def _logprob_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> LogprobDict:
    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token)

    result = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token, logprob) in enumerate(entry.top, start=1):
        if token not in result:
            result[token] = Logprob(logprob, rank, text(token))
    return result
