"""Prompts and messages of a body as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.errors import RequestError

if TYPE_CHECKING:
    from plait.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
MAX_MESSAGES = 2048
MAX_PARTS = 2048
_ROLES = ("system", "developer", "user", "assistant")
_TEXT_KEYS = ("role", "content", "name")
# What clients send back with an assistant's message although it says nothing.
_EMPTY_KEYS = ("tool_calls", "tool_call_id", "function_call", "audio", "refusal", "annotations")
_RESERVED = ("self", "messages", "add_generation_prompt", "tools", "documents")


@dataclass(frozen=True)
class Prompt:
    """One prompt. text: as it was given, None where token ids were."""

    ids: list[int]
    text: str | None = None


def split_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of /v1/completions: a string, a list of strings, token ids, or a list of lists of token ids.

    Raises RequestError (field "prompt") before anything is computed.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError("prompt must be a string, a list of strings, token ids or lists of token ids", "prompt")
    if not value:
        raise RequestError("prompt is an empty list: give at least one prompt", field="prompt")
    if _all_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(value)} entries, at most {MAX_PROMPTS} are allowed", field="prompt")
    for index, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and _all_ids(item)):
            raise RequestError(f"prompt[{index}] must be a string or a list of token ids", field="prompt")
        if item == []:
            raise RequestError(f"prompt[{index}] is empty: give at least one token", field="prompt")
        if type(item) is not type(value[0]):
            raise RequestError("prompt mixes strings and token ids: give only one kind", field="prompt")
    return value


def _all_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | list[int], add_special_tokens: bool = True, max_model_len: int | None = None
) -> Prompt:
    """Token ids of one prompt; raises RequestError for an empty one, CapacityError for one that is far too long."""
    if isinstance(prompt, list):
        return Prompt(prompt)
    ids = tokenizer.encode(prompt, add_bos=add_special_tokens, max_tokens=max_model_len)
    if not ids:
        raise RequestError("the prompt is empty and this model has no start token: give at least one token", "prompt")
    return Prompt(ids, prompt)


def encode_messages(
    tokenizer: Tokenizer,
    messages: Any,
    add_generation_prompt: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
    max_model_len: int | None = None,
) -> Prompt:
    """Token ids of a conversation. Raises RequestError naming the message, CapacityError where it is far too long,
    TokenizerError where the template fails."""
    kwargs = template_kwargs or {}
    for name in kwargs:
        if name in _RESERVED or not name.isidentifier():
            raise RequestError(f"chat_template_kwargs must not set {name!r:.80}", field="chat_template_kwargs")
    wanted = True if add_generation_prompt is None else add_generation_prompt
    return Prompt(tokenizer.encode_conversation(check_messages(messages), kwargs, wanted, max_model_len))


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with the fields that a template may see. `developer` is OpenAI's newer word for `system`."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries, at most {MAX_MESSAGES} are allowed", "messages")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object with role and content", field="messages")
    for key, value in message.items():
        if key in _TEXT_KEYS:
            continue
        if key not in _EMPTY_KEYS:
            raise RequestError(f"{where} has the unknown field {key!r:.80}", field=f"{where}.{key:.80}")
        if value not in (None, [], ""):
            raise RequestError(f"{where}.{key} is not supported yet; leave it out", field=f"{where}.{key}")
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.80}", field=f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        _check_parts(f"{where}.content", content)
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"{where}.name must be a string", field=f"{where}.name")
    result = {"role": "system" if role == "developer" else role, "content": content}
    return result if name is None else {**result, "name": name}


def _check_parts(where: str, parts: list[Any]) -> None:
    if len(parts) > MAX_PARTS:
        raise RequestError(f"{where} has {len(parts)} parts, at most {MAX_PARTS} are allowed", field=where)
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{index}] must be a part of type 'text'; only text is supported", field=where)
        for key in part.keys() - {"type", "text"}:
            field = f"{where}[{index}].{key:.80}"
            raise RequestError(f"{where}[{index}] has the unknown field {key!r:.80}", field=field)
