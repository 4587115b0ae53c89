"""What a caller hands to `LLM`, told apart: prompts of every form, conversations, priorities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plait.errors import RequestError

Prompt = str | Mapping[str, Any] | Sequence[int]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def as_list(prompts: Any) -> list[Any]:
    """One prompt (text, dictionary, ids) or several, as a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise RequestError(f"prompts must be prompts or a list of them, got {type(prompts).__name__}", field="prompt")
    items = list(prompts)
    if items and all(hasattr(i, "__index__") for i in items):
        return [items]
    return items


def parse_prompt(item: Any) -> tuple[str | None, Sequence[int] | None, str | None]:
    """(text, ids, cache salt) of one prompt; ids None where the text is to be encoded."""
    if isinstance(item, str):
        item = {"prompt": item}
    elif not isinstance(item, Mapping):
        item = {"prompt_token_ids": item}
    unknown = [key for key in item if key not in _KEYS]
    if unknown or not ("prompt" in item or "prompt_token_ids" in item):
        wrong = f"unknown key {unknown[0]!r:.40}" if unknown else "neither prompt nor prompt_token_ids"
        raise RequestError(f"a prompt dictionary has {wrong}", field="prompt")
    text, ids, salt = (item.get(key) for key in _KEYS)
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, got {type(salt).__name__}", field="cache_salt")
    if text is None and ids is None:
        raise RequestError("a prompt is None: give text or token ids", field="prompt")
    if text is not None:
        _check_text(text)
    if ids is not None and (isinstance(ids, (str, bytes, Mapping)) or not _is_sequence(ids)):
        raise RequestError(f"a prompt must be text or a list of token ids, got {type(ids).__name__}", field="prompt")
    return text, ids, salt


def check_conversations(messages: Any) -> list[Any]:
    """One conversation or several, as a list of them; each is a list of message dictionaries."""
    if isinstance(messages, (str, bytes, Mapping)) or not _is_sequence(messages):
        kind = type(messages).__name__
        raise RequestError(f"messages must be a list of messages, got {kind}: write [message] for one", "messages")
    if len(messages) == 0:
        raise RequestError("messages is empty: give at least one message", field="messages")
    conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
    for conversation in conversations:
        if isinstance(conversation, Mapping) or not _is_sequence(conversation) or isinstance(conversation, str):
            raise RequestError("messages must be a list of messages, or of such lists", field="messages")
        if len(conversation) == 0 or not all(isinstance(message, Mapping) for message in conversation):
            raise RequestError('a message must be a dictionary such as {"role": ..., "content": ...}', "messages")
    return conversations


def check_priority(priority: Any, count: int) -> None:
    """RequestError unless there is an integer for each of `count` prompts; None is fine."""
    if priority is None:
        return
    if not _is_sequence(priority) or not all(hasattr(p, "__index__") for p in priority):
        raise RequestError("priority must be a list of integers, one per prompt", field="priority")
    if len(priority) != count:
        raise RequestError(f"{len(priority)} priorities for {count} prompts", field="priority")


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise RequestError(f"prompt must be a string, got {type(text).__name__}", field="prompt")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("prompt holds half of a surrogate pair, which is no character", field="prompt") from None


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")
