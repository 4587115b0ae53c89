"""Chat templates: messages in, the text of the prompt out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.errors import RequestError, TokenizerError


class ChatTemplate:
    """A compiled Jinja2 chat template. The template is untrusted input: see `template_sandbox`.

    Args:
        source: the template's text.
        special_tokens: names that templates use (`bos_token`, `eos_token`, ...) and their texts.

    Raises:
        TokenizerError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        from plait.text.template_sandbox import TemplateEnvironment

        self._environment = TemplateEnvironment()
        self._special_tokens = dict(special_tokens)
        self._environment.budget.start()
        try:
            # Jinja ends a template's last newline; transformers keeps that, so nothing is changed here.
            self._template = self._environment.from_string(source)
            self._wants_parts = _iterates_over_content(self._environment, source)
        except Exception as error:  # untrusted text can fail in any way: syntax, recursion, constant folding
            raise TokenizerError(f"the chat template does not compile: {_one_line(error)}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text.

        Args:
            messages: as `validate_messages` returns them.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further names the template can use (`tools`, `documents`, `enable_thinking`, ...).

        Raises:
            TokenizerError: the template raised, went beyond its limits, or is faulty.
        """
        if self._wants_parts:
            messages = [_with_parts(message) for message in messages]
        names = {"tools": None, "documents": None, **self._special_tokens, **variables}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        budget = self._environment.budget
        budget.start()
        try:
            return self._environment.concat(self._template.generate(names))
        except Exception as error:  # as above
            raise TokenizerError(f"the chat template failed: {_one_line(error)}") from error


def validate_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with their text parts joined by newlines to one string each.

    Raises:
        RequestError: field "messages"; an empty list, a message without a role, a content that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list with at least one message", field="messages")
    return [_validate_message(index, message) for index, message in enumerate(messages)]


def _validate_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] must be an object with role and content", field="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"messages[{index}].role must be a non-empty string", field="messages")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_part_text(index, number, part) for number, part in enumerate(content))
    elif content is None:
        # An assistant message may hold tool calls alone. Templates join strings, so None would fail in them.
        if not message.get("tool_calls"):
            raise RequestError(f"messages[{index}].content is missing", field="messages")
        content = ""
    elif not isinstance(content, str):
        raise RequestError(f"messages[{index}].content must be a string or a list of text parts", field="messages")
    return {**message, "content": content}


def _part_text(index: int, number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise RequestError(
            f"messages[{index}].content[{number}] must be a part of type 'text' (plait reads text only)",
            field="messages",
        )
    return text


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _iterates_over_content(environment: Any, source: str) -> bool:
    """Whether the template loops over the parts of a content and does not expect a plain string as well."""
    from jinja2 import nodes

    tree = environment.parse(source)
    loops = any(_names_content(loop.iter) for loop in tree.find_all(nodes.For))
    return loops and not any(test.name == "string" for test in tree.find_all(nodes.Test))


def _names_content(node: Any) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
