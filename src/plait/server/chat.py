"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from plait.engine.outputs import ChoiceDelta
from plait.server.answering import event
from plait.server.call import Call
from plait.server.logprobs import chat_logprobs, prompt_logprobs
from plait.server.protocol import ChatBody


class ChatAnswer:
    """Makes the document, or the chunks, of a call."""

    def __init__(self, call: Call, body: ChatBody) -> None:
        self._call = call
        self._body = body

    async def document(self) -> dict[str, Any]:
        """The whole answer."""
        call = self._call
        choices = [self._choice(i) for i in range(call.num_choices)]
        prompt_entries: Any = None
        async for index, delta in call.deltas():
            choice = choices[index]
            choice["message"]["content"] += delta.text
            if delta.logprobs and self._body.logprobs:
                choice["logprobs"]["content"] += self._logprobs(delta)
            if delta.finish_reason is not None:
                choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            prompt_entries = delta.prompt_logprobs or prompt_entries
        document = {**self._frame("chat.completion"), "choices": choices, "usage": call.usage()}
        if self._body.prompt_logprobs is not None:
            tokenizer, top = call.served.tokenizer, self._body.prompt_logprobs
            document["prompt_logprobs"] = prompt_logprobs(tokenizer, prompt_entries or [], top)
        return document

    async def events(self) -> AsyncIterator[bytes]:
        """Per choice: the role, the text, an empty delta with the finish reason; the usage last where it is wanted."""
        call = self._call
        frame = self._frame("chat.completion.chunk")
        no_usage = {"usage": None} if self._body.include_usage else {}

        def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, **ending: Any) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **ending}
            return event({**frame, "choices": [choice], **no_usage})

        for index in range(call.num_choices):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for index, delta in call.deltas():
            logprobs = {"content": self._logprobs(delta)} if delta.logprobs and self._body.logprobs else None
            if delta.text or logprobs is not None:
                yield chunk(index, {"content": delta.text}, logprobs)
            if delta.finish_reason is not None:
                yield chunk(index, {}, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if self._body.include_usage:
            yield event({**frame, "choices": [], "usage": call.usage()})

    def _frame(self, kind: str) -> dict[str, Any]:
        call = self._call
        return {"id": call.id, "object": kind, "created": call.created, "model": call.model}

    def _choice(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": {"content": [], "refusal": None} if self._body.logprobs else None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _logprobs(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        return chat_logprobs(self._call.served.tokenizer, delta.logprobs or [], self._body.top_logprobs or 0)
