"""From the fields of a body to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.engine.params import SamplingParams
from plait.server.errors import bad_request
from plait.server.protocol import ChatBody, CompletionBody, SamplingBody

_DEFAULT_COMPLETION_TOKENS = 16
_OWN_MEANING = frozenset({"logprobs"})  # the two endpoints' logprobs differ from SamplingParams'
_SHARED = (SamplingParams.names() & frozenset(SamplingBody.model_fields)) - _OWN_MEANING


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """defaults: the checkpoint's own. Raises RequestError or ApiError naming the field."""
    values = {"max_tokens": _DEFAULT_COMPLETION_TOKENS, **defaults, **_given(body)}
    if body.logprobs is not None:
        values["logprobs"] = body.logprobs
    if body.echo and (body.logprobs is not None or values["max_tokens"] == 0):
        values["prompt_logprobs"] = max(body.logprobs or 0, body.prompt_logprobs or 0)
    if values["max_tokens"] == 0 and "prompt_logprobs" not in values:
        raise bad_request("max_tokens 0 generates nothing; it needs echo or prompt_logprobs", "max_tokens")
    if values["max_tokens"] == 0:
        values.pop("min_tokens", None)
    return SamplingParams(**values)


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """As `completion_params`; max_tokens fills the context where neither body nor checkpoint says otherwise."""
    values = {"max_tokens": None, **defaults, **_given(body)}
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        values["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    return SamplingParams(**values)


def chat_fields(body: ChatBody) -> dict[str, str]:
    """SamplingParams' names -> the body's, for error messages."""
    fields = {"logprobs": "top_logprobs", "prompt": "messages"}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    return fields


def _given(body: SamplingBody) -> dict[str, Any]:
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs does not work with stream", "prompt_logprobs")
    return {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
