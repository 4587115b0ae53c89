"""Token ids back to text: the bytes of a token, and text that grows token by token."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from plait.errors import RequestError, TokenizerError

if TYPE_CHECKING:
    from plait.text.tokenizer import Tokenizer

# A character has at most 4 bytes, so this many tokens before a position hold all of one that is incomplete there.
_CONTEXT_TOKENS = 4


@cache
def byte_of_printable() -> dict[str, int]:
    """GPT-2's alphabet: each byte's printable stand-in, and the byte it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes that each token stands for, read off a `tokenizers` decoder.

    Decoding is the concatenation of these bytes, except for what `strip_first` takes from the very first token of a
    text: "" nothing, "space" one leading space (a `Strip` step), "all" every leading space (Metaspace).
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        self._steps = _decoder_steps(backend.decoder)
        self.strip_first = _stripping(self._steps)

    def __getitem__(self, token_id: int) -> bytes:
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._compute(token_id)
        return data

    def strip(self, data: bytes) -> bytes:
        """`data`, the bytes of a text's first token, without the space that was put before the text."""
        if self.strip_first == "all":
            return data.lstrip(b" ")
        return data[1:] if self.strip_first == "space" and data.startswith(b" ") else data

    def _compute(self, token_id: int) -> bytes:
        text = self._added.get(token_id)
        is_added = text is not None
        if text is None:
            text = self._backend.id_to_token(token_id)
        if text is None:
            return b""  # a hole in a sparse vocabulary
        for step in self._steps:
            kind = step["type"]
            if kind == "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            elif kind == "Metaspace":
                text = text.replace(step["replacement"], " ")
            elif kind == "Spaced":
                text = " " + text
            elif kind == "ByteFallback" and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
            elif kind == "ByteLevel" and not is_added:
                table = byte_of_printable()
                if all(character in table for character in text):
                    return bytes(table[character] for character in text)
        return text.encode("utf-8")


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return [{"type": "Spaced"}]  # `tokenizers` then puts a space between tokens
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    for step in steps:
        known = step["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")
        known |= step["type"] == "Replace" and "String" in step["pattern"]
        known |= step["type"] == "Strip" and step["content"] == " " and step["start"] <= 1 and not step["stop"]
        if not known:
            raise TokenizerError(f"the tokenizer's decoder step {json.dumps(step)} is not supported by plait")
    return steps


def _stripping(steps: list[dict[str, Any]]) -> str:
    for step in steps:
        if step["type"] == "Spaced" or (step["type"] == "Strip" and step["start"]):
            return "space"
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return "all"
    return ""


class IncrementalDetokenizer:
    """Text that grows with the generated tokens.

    The concatenation of all that `push` and `flush` return is the text of the generated ids as it stands after the
    prompt: a space at its start belongs to it unless it is the very start of the whole text. An incomplete character is
    held back until its bytes are there; bytes that can't become one give U+FFFD.

    Args:
        tokenizer: whose ids these are.
        prompt_ids: the ids before the generated ones.
        skip_special_tokens: leave the text of special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._bytes = tokenizer.bytes_of
        self._vocab_size = tokenizer.vocab_size
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._at_start = bool(self._bytes.strip_first) and all(id in self._skipped for id in prompt_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        recent = [id for id in prompt_ids[-64:] if id not in self._skipped][-_CONTEXT_TOKENS:]
        self._decoder.decode(b"".join(self._bytes[id] for id in recent))

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete. Raises RequestError for an id outside the vocabulary."""
        return self._decoder.decode(b"".join(map(self._visible_bytes, ids)))

    def flush(self) -> str:
        """What an incomplete character at the end turns into, U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)

    def _visible_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._vocab_size:
            raise RequestError(
                f"token id {token_id} is outside the vocabulary of {self._vocab_size}", field="token_ids"
            )
        if token_id in self._skipped:
            return b""
        data = self._bytes[token_id]
        if self._at_start:
            self._at_start = False
            return self._bytes.strip(data)
        return data
