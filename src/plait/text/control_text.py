"""Keeps the text of contents from becoming control tokens.

A marker, a private-use character that occurs nowhere else, goes into every piece of content that reads like a control
token. `tokenizers` finds added tokens in the raw text, where the marker keeps it from finding that one, and removes the
marker only afterwards, in the first step of the normaliser. So what is left is encoded whole, as if added tokens with
such texts did not exist, while the control tokens that the template wrote are found as ever.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.errors import RequestError

_MARKERS = (*range(0x10FFFD, 0x100000, -1), *range(0xFFFFD, 0xF0000, -1))


class ControlText:
    """Finds texts in contents that read like one of `tokens`, whatever their case, and breaks them with a marker.

    A template may change contents: trim them, join two of them, change their case. A content that begins or ends with a
    part of a token gets a marker there as well.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token.lower() for token in tokens if len(token) > 1)
        self._lengths = sorted({len(token) for token in self._tokens})
        self._longest = self._lengths[-1] if self._lengths else 0
        firsts = sorted({form for token in self._tokens for form in (token[0], token[0].upper()) if len(form) == 1})
        self._starts = re.compile("[" + "".join(map(re.escape, firsts)) + "]") if firsts else None
        # In order, so that a part of a token is found by searching: all parts together would be quadratic in length.
        self._sorted = sorted(self._tokens)
        self._reversed = sorted(token[::-1] for token in self._tokens)

    def break_up(self, text: str, marker: str) -> str:
        """`text` with a marker after the first character of each control text, and at edges that hold a part of one."""
        if self._starts is None or not text:
            return text
        cuts = [match.end() for match in self._starts.finditer(text) if self._begins_token(text, match.start())]
        cuts.extend(self._edge_cuts(text))
        pieces, last = [], 0
        for cut in sorted(set(cuts)):
            pieces.append(text[last:cut])
            last = cut
        return marker.join([*pieces, text[last:]])

    def _begins_token(self, text: str, start: int) -> bool:
        near = text[start : start + self._longest].lower()
        return any(near[:length] in self._tokens for length in self._lengths)

    def _edge_cuts(self, text: str) -> list[int]:
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        tail = text[max(end - self._longest, 0) : end].lower()
        head = text[start : start + self._longest].lower()
        cuts = []
        if any(_begins_longer(self._sorted, tail[-length:]) for length in range(1, len(tail) + 1)):
            cuts.append(end)
        if any(_begins_longer(self._reversed, head[:length][::-1]) for length in range(1, len(head) + 1)):
            cuts.append(start)
        return cuts

    def occurs_in(self, text: str) -> bool:
        """Whether one of the tokens, whatever its case, stands in a text as a whole."""
        return self._starts is not None and any(
            self._begins_token(text, match.start()) for match in self._starts.finditer(text)
        )

    def break_up_all(self, value: Any, marker: str) -> Any:
        """`break_up` for every string in nested lists and mappings, keys included."""
        if isinstance(value, str):
            return self.break_up(value, marker)
        if isinstance(value, Mapping):
            return {self.break_up_all(key, marker): self.break_up_all(item, marker) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.break_up_all(item, marker) for item in value]
        return value


def _begins_longer(ordered: Sequence[str], part: str) -> bool:
    """Whether one of the texts, which are in order, begins with `part` and goes on."""
    place = bisect_right(ordered, part)
    return place < len(ordered) and ordered[place].startswith(part)


def strings_in(value: Any) -> Iterable[str]:
    """Every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from strings_in(item)


def unused_marker(texts: Iterable[str]) -> str:
    """A private-use character that none of `texts` has; the first one nearly always."""
    used = set().union(*(set(re.findall("[\U000f0000-\U0010ffff]", text)) for text in texts))
    for code in _MARKERS:
        if chr(code) not in used:
            return chr(code)
    raise RequestError("the text holds every private-use character there is", field="messages")


class MarkedEncoder:
    """Encodes text with markers: the backend's model and steps behind a normaliser that removes the marker."""

    def __init__(self, backend: Any, marker: str) -> None:
        from tokenizers import AddedToken, Tokenizer, normalizers

        marked = Tokenizer(backend.model)  # the model is shared, not copied
        steps = [normalizers.Replace(marker, "")]
        marked.normalizer = normalizers.Sequence(steps + ([backend.normalizer] if backend.normalizer else []))
        if backend.pre_tokenizer:
            marked.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        # Not `normalized`: such a token would be looked for after the marker has gone.
        same = [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=token.special,
            )
            for token in added.values()
        ]
        # In one call each: the search automaton is built anew by every call.
        marked.add_special_tokens([token for token in same if token.special])
        marked.add_tokens([token for token in same if not token.special])
        self._marked = marked
        self._original_ids = {marked.token_to_id(token.content): id for id, token in added.items()}

    def encode(self, text: str) -> list[int]:
        ids = self._marked.encode(text, add_special_tokens=False).ids
        return [self._original_ids.get(id, id) for id in ids]
