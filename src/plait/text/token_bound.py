"""How few tokens a text can become: known from its length alone, before any time is spent on tokenising it."""

from __future__ import annotations

from typing import Any

from plait.text.detokenizer import TokenBytes

# Unicode's normal forms and the like make a text shorter, though never by more than this.
_NORMALIZED_SHRINKAGE = 4
_BYTES_OF_UTF8 = {*range(0xC0), *range(0xC2, 0xF5)}
_ASCII_SPACES = b" \t\n\r\v\f"


class TokenBound:
    """A lower bound on the number of tokens: the bytes of a text over the bytes of the longest token.

    Bytes that the tokenizer may drop, or may put into one token without end, do not count: those that have no token of
    their own, and spaces where a normaliser, a pre-tokenizer or an added token swallows them. Words that are unknown as
    a whole (WordPiece, WordLevel) have no bound: it is 0 for every text.
    """

    def __init__(self, backend: Any, bytes_of: TokenBytes) -> None:
        ids = backend.get_vocab(with_added_tokens=True).values()
        pieces = [bytes_of[id] for id in ids]
        single = {piece[0] for piece in pieces if len(piece) == 1}
        missing = _BYTES_OF_UTF8 - single
        if "ByteLevel" not in str(backend.pre_tokenizer) and any(byte >= 0x80 for byte in missing):
            # A character with such a byte may be unknown with all its bytes.
            missing |= set(range(0x80, 0x100))
        added = backend.get_added_tokens_decoder().values()
        takes_spaces = (
            backend.normalizer is not None
            or any(token.lstrip or token.rstrip for token in added)
            or any(word in str(backend.pre_tokenizer) for word in ("Removed", "Whitespace", "Bert"))
        )
        self._ignored = bytes(missing) + (_ASCII_SPACES if takes_spaces else b"")
        self._bounded = type(backend.model).__name__ in ("BPE", "Unigram")
        self._longest = max(map(len, pieces), default=1) or 1
        if backend.normalizer is not None:
            self._longest *= _NORMALIZED_SHRINKAGE

    def at_least(self, text: str) -> int:
        """The number of tokens that `text` has or exceeds."""
        if not self._bounded:
            return 0
        return -(-len(text.encode("utf-8", "replace").translate(None, self._ignored)) // self._longest)
