"""Chats: messages through the model's own template, where the assistant's tokens are learnt.

Which tokens are the assistant's is found by rendering, never by searching text: with p the rendering of the messages
before a turn and the opening of the assistant's, and q the rendering up to and including the turn, the turn is what
q has beyond p. That needs p to be the beginning of q, and, for several turns in one sequence, q to be the beginning of
the whole. Some templates render earlier turns otherwise than the last (they leave out what was thought): such a chat
becomes a sequence for each of the assistant's turns, each as the model will see it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from plait.errors import DataError, PlaitError
from plait.text.tokenizer import Tokenizer
from plait.training.data.config import DataConfig, SourceConfig
from plait.training.data.examples import Examples, Packed, Sequences, TokenStore
from plait.training.data.files import Row
from plait.training.data.items import Content, Item, column
from plait.training.data.task import Encoded, Task, fit

Messages = Sequence[Mapping[str, Any]]
_ASSISTANT = "assistant"


def _read(source: SourceConfig) -> Callable[[Row], Content | None]:
    def read(row: Row) -> Content | None:
        messages = list(column(row, source.messages, list))
        if source.answer:
            messages.append({"role": _ASSISTANT, "content": column(row, source.answer)})
        if not messages:
            return None
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise DataError(f"{row.place}: each of {source.messages} must be an object with role and content")
        asked = "\n".join(text for m in messages if m["role"] == "user" for text in _contents(m))
        tools = row.values.get("tools")
        content = (messages, {"tools": tools} if tools else {})
        return Content(content, (asked,), asked) if asked.strip() else Content(content, (), json.dumps(messages))

    return read


def _contents(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def sequences(tokenizer: Tokenizer, messages: Messages, variables: Mapping[str, Any] | None = None) -> list[Encoded]:
    """The token sequences of a chat with the assistant's tokens learnt: one, or one a turn (see above).

    A turn's tokens are those up to and including the last one that ends a sequence, if it has one: what the template
    writes after that is nobody's. A token across the border of p belongs to the turn.

    Raises DataError where p is not the beginning of q, or where the assistant speaks first; RequestError and
    TokenizerError as the template does.
    """
    variables = dict(variables or {})
    turns = [index for index, message in enumerate(messages) if message["role"] == _ASSISTANT]
    if turns[:1] == [0]:
        raise DataError("the chat begins with the assistant's message: put a user's or a system message before it")
    renderings = [_render_turn(tokenizer, messages, index, variables) for index in turns]
    whole = tokenizer.render_chat(messages, False, **variables)
    if all(whole.startswith(text) for text in renderings):
        ids = tokenizer.encode_conversation(messages, variables, False)
        learnt = [0] * len(ids)
        for index in turns:
            _learn(tokenizer, messages, index, variables, ids, learnt)
        return [Encoded(ids, learnt)]
    found = []
    for index in turns:
        ids = tokenizer.encode_conversation(messages[: index + 1], variables, False)
        learnt = [0] * len(ids)
        _learn(tokenizer, messages, index, variables, ids, learnt)
        found.append(Encoded(ids, learnt))
    return found


def _render_turn(tokenizer: Tokenizer, messages: Messages, index: int, variables: Mapping[str, Any]) -> str:
    before = tokenizer.render_chat(messages[:index], True, **variables)
    after = tokenizer.render_chat(messages[: index + 1], False, **variables)
    if not after.startswith(before):
        place = next((k for k, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(after))
        raise DataError(
            f"the chat template renders message {index} so that the answer cannot be told from the prompt: the prompt "
            f"has {before[place : place + 40]!r} where the answer's rendering has {after[place : place + 40]!r}"
        )
    return after


def _learn(
    tokenizer: Tokenizer,
    messages: Messages,
    index: int,
    variables: Mapping[str, Any],
    ids: Sequence[int],
    learnt: list[int],
) -> None:
    """Mark the tokens of the turn `index` in `ids`, which begin with its rendering."""
    start = _shared(tokenizer.encode_conversation(messages[:index], variables, True), ids)
    end = len(ids)
    if index + 1 < len(messages):
        end = _shared(tokenizer.encode_conversation(messages[: index + 1], variables, False), ids)
    last = max((k for k in range(start, end) if ids[k] in tokenizer.eos_token_ids), default=end - 1)
    learnt[start : last + 1] = [1] * (last + 1 - start)


def _shared(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    for count, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return count
    return min(len(one), len(two))


def _encode(items: Sequence[Item], tokenizer: Tokenizer, config: DataConfig, tally: Counter[str]) -> Iterator[Encoded]:
    for item in items:
        try:
            found = sequences(tokenizer, *item.content)
        except PlaitError as error:
            raise DataError(f"{item.place}: {error}") from None
        if len(found) != 1:
            tally["without answer" if not found else "cut into turns"] += 1
        for encoded in found:
            yield from fit(encoded, item, config, tally)


def _view(store: TokenStore, config: DataConfig) -> Examples:
    examples = Sequences(store)
    return Packed(examples, config.context) if config.packed else examples


CHAT = Task(
    # `source` names the collection that a chat was taken from, which would put thousands on one side.
    columns=lambda source: (source.messages, source.answer, "source"),
    read=_read,
    texts=lambda item: [text for message in item.content[0] for text in _contents(message)],
    encode=_encode,
    view=_view,
    tags=lambda config: (),
    fields=lambda config: {"context": config.context, "too_long": config.too_long},
)
