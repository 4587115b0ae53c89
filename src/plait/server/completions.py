"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from plait.engine.outputs import ChoiceDelta
from plait.server.answering import event
from plait.server.call import Call
from plait.server.logprobs import CompletionLogprobs, join, prompt_logprobs
from plait.server.protocol import CompletionBody


class CompletionAnswer:
    """Makes the document, or the chunks, of a call."""

    def __init__(self, call: Call, body: CompletionBody) -> None:
        self._call = call
        self._body = body
        self._tokenizer = call.served.tokenizer
        self._echo_texts = [self._echo(position) for position in range(len(call.prompts))] if body.echo else []
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_entries: dict[int, Any] = {}

    async def document(self) -> dict[str, Any]:
        """The whole answer."""
        call, n = self._call, self._call.params.n
        choices = [self._choice(i) for i in range(call.num_choices)]
        parts: list[list[dict[str, Any]]] = [[] for _ in choices]
        async for index, delta in call.deltas():
            choice = choices[index]
            text, logprobs = self._add(index, delta)
            choice["text"] += text
            if logprobs is not None:
                parts[index].append(logprobs)
            if delta.finish_reason is not None:
                choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        for index, choice in enumerate(choices):
            if self._body.logprobs is not None:
                choice["logprobs"] = join(parts[index])
            if self._body.prompt_logprobs is not None:
                entries = self._prompt_entries.get(index // n) or []
                choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, entries, self._body.prompt_logprobs)
        return {**self._frame(), "choices": choices, "usage": call.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer in chunks, with the usage last where it is wanted."""
        frame = self._frame()
        no_usage = {"usage": None} if self._body.include_usage else {}
        async for index, delta in self._call.deltas():
            text, logprobs = self._add(index, delta)
            if text or logprobs is not None or delta.finish_reason is not None:
                choice = self._choice(index)
                choice |= {"text": text, "logprobs": logprobs}
                choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                yield event({**frame, "choices": [choice], **no_usage})
        if self._body.include_usage:
            yield event({**frame, "choices": [], "usage": self._call.usage()})

    def _frame(self) -> dict[str, Any]:
        call = self._call
        return {"id": call.id, "object": "text_completion", "created": call.created, "model": call.model}

    def _choice(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _add(self, index: int, delta: ChoiceDelta) -> tuple[str, dict[str, Any] | None]:
        """What a delta adds: text (with the echoed prompt before the first) and logprobs."""
        position = index // self._call.params.n
        if delta.prompt_logprobs is not None:
            self._prompt_entries[position] = delta.prompt_logprobs
        first = index not in self._logprobs
        if first:
            self._logprobs[index] = self._new_logprobs(position)
        text = delta.text
        echo = self._echo_texts[position] if first and self._body.echo else ""
        if self._body.logprobs is None:
            return echo + text, None
        parts = []
        if first and self._body.echo:
            parts.append(self._echo_logprobs(position))
        if delta.logprobs:
            ended = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
            hides = ended and not self._call.params.include_stop_str_in_output
            parts.append(self._logprobs[index].add(delta.token_ids, delta.logprobs, hides_last=hides))
        return echo + text, join(parts) if parts else None

    def _new_logprobs(self, position: int) -> CompletionLogprobs:
        prompt, skip = self._call.prompts[position], self._call.params.skip_special_tokens
        offset = len(self._echo_texts[position]) if self._body.echo else 0
        return CompletionLogprobs(self._tokenizer, self._body.logprobs or 0, prompt.ids, skip, offset)

    def _echo(self, position: int) -> str:
        prompt = self._call.prompts[position]
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.ids, skip_special_tokens=False)

    def _echo_logprobs(self, position: int) -> dict[str, Any]:
        prompt = self._call.prompts[position]
        num_added = 0
        if prompt.text is not None:
            num_added = len(prompt.ids) - len(self._tokenizer.encode(prompt.text, add_bos=False))
        shape = CompletionLogprobs(self._tokenizer, self._body.logprobs or 0, [], skip_special_tokens=False)
        return shape.add(prompt.ids, self._prompt_entries[position], num_hidden=num_added)
