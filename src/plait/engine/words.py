"""Words of a request as token ids: bad_words and DRY's sequence breakers, which the engine takes as ids only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plait.engine.params import SamplingParams

if TYPE_CHECKING:
    from plait.text.tokenizer import Tokenizer

_MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20


class WordResolver:
    """Fills bad_words_token_ids and dry_breaker_token_ids; belongs to whoever holds the tokenizer.

    Breakers are looked for in the whole vocabulary, once per string.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: list[bytes] = []
        self._breakers: dict[str, list[tuple[int, ...]]] = {}

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """The same parameters with ids in place; unchanged where they have no words or bring ids."""
        filled: dict[str, Any] = {}
        if params.bad_words and params.bad_words_token_ids is None:
            filled["bad_words_token_ids"] = tuple(
                ids for word in params.bad_words for ids in self._spellings(word) if ids
            )
        if params.uses_dry and params.dry_breaker_token_ids is None:
            sequences = [s for text in params.dry_sequence_breakers for s in self._breaker(text)]
            filled["dry_breaker_token_ids"] = tuple(dict.fromkeys(sequences))
        return replace(params, **filled) if filled else params

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """The word at the start of a text and, where that is written with other tokens, after a space."""
        bare = tuple(self._tokenizer.encode(word, add_bos=False))
        spaced = tuple(self._tokenizer.encode(" " + word.lstrip(), add_bos=False))
        return [bare] if spaced == bare or spaced[1:] == bare else [bare, spaced]

    def _breaker(self, text: str) -> list[tuple[int, ...]]:
        if text not in self._breakers:
            self._breakers[text] = self._find_breaker(text.encode()[:_MAX_BREAKER_BYTES])
        return self._breakers[text]

    def _find_breaker(self, breaker: bytes) -> list[tuple[int, ...]]:
        """Every way in which the breaker can begin inside a token: (that token, then the rest's tokens)."""
        if not self._vocabulary:
            size = self._tokenizer.vocab_size
            self._vocabulary = [self._tokenizer.token_bytes(i) for i in range(size)]
        found: list[tuple[int, ...]] = []
        tails: dict[int, tuple[int, ...] | None] = {}
        for token, word in enumerate(self._vocabulary):
            if breaker in word:
                found.append((token,))
                continue
            for length in range(1, min(len(word), len(breaker) - 1) + 1):
                if not word.endswith(breaker[:length]):
                    continue
                if length not in tails:
                    tails[length] = self._encode(breaker[length:])
                tail = tails[length]
                if tail is not None:
                    found.append((token, *tail[:_MAX_TAIL_TOKENS]))
        return found

    def _encode(self, rest: bytes) -> tuple[int, ...] | None:
        try:
            return tuple(self._tokenizer.encode_plain(rest.decode()))
        except UnicodeDecodeError:
            return None  # the token ends inside a character
