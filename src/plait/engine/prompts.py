"""A prompt from what a person gives on the command line: text, a chat message, or token ids."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from plait.errors import TokenizerError, UsageError

if TYPE_CHECKING:
    from plait.engine.llm import LLM


def prompt_ids(llm: LLM, text: str, chat: bool = False, system: str | None = None) -> list[int]:
    """Token ids of a completion prompt, or of one user message through the chat template."""
    if llm.tokenizer is None:
        raise TokenizerError(f"{llm.bundle.name} has no tokenizer: give token ids")
    if not chat:
        return llm.tokenizer.encode(text)
    before = [] if system is None else [{"role": "system", "content": system}]
    return llm.tokenizer.encode_chat([*before, {"role": "user", "content": text}])


def read_ids(text: str, name: str) -> list[int]:
    """Token ids from text: a JSON list, or numbers separated by spaces, commas or lines. name: for the error."""
    try:
        listed = text.lstrip().startswith("[")
        ids = json.loads(text) if listed else [int(word) for word in text.replace(",", " ").split()]
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise UsageError(f"{name}: must hold token ids: a JSON list, or whole numbers separated by spaces")
    return ids
