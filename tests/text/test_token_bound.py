"""The bound lies below the true count, and near enough to be of use."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from plait.errors import CapacityError, RequestError
from plait.text.detokenizer import TokenBytes, byte_of_printable
from plait.text.token_bound import TokenBound
from plait.text.tokenizer import Tokenizer
from tests.text import small_tokenizers as small

TEXTS = [
    "",
    "a",
    " " * 500,
    "\n\n \t" * 100,
    " ".join(small.CORPUS),
    "xin chào 👩‍👩‍👧 你好" * 30,
    "\u0000\u3000é" * 100,
    "zzz" * 200,
    "<mark>      " * 50,
]


def _word_level() -> Backend:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]", max_input_chars_per_word=5))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def _squeezing() -> Backend:
    backend = small.byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "")])
    return backend


BACKENDS = {
    "byte level": small.byte_level,
    "flags": lambda: small.byte_level(AddedToken("<mark>", lstrip=True, rstrip=True, special=True)),
    "lowercase": small.lowercasing,
    "metaspace": small.metaspace,
    "unknown words": _word_level,
    "spaces vanish": _squeezing,
}


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_no_text_has_fewer_tokens(make) -> None:
    backend = make()
    bound = TokenBound(backend, TokenBytes(backend))
    for text in TEXTS:
        assert bound.at_least(text) <= len(backend.encode(text, add_special_tokens=False).ids), text


def test_a_byte_without_token_takes_no_others_out_of_the_count() -> None:
    """Many byte-level vocabularies lack the bytes that no text of their training had."""
    alphabet = [character for character, byte in byte_of_printable().items() if byte != 0xF1]
    backend = Backend(models.BPE({character: id for id, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    bound = TokenBound(backend, TokenBytes(backend))
    for text, count in (("é" * 100, 200), ("\U00040000" * 100, 300)):  # F1 80 80 80
        assert bound.at_least(text) == count == len(backend.encode(text).ids)


def test_the_bound_is_bytes_over_the_longest_token() -> None:
    backend = small.byte_level()
    pieces = TokenBytes(backend)
    longest = max(len(pieces[id]) for id in backend.get_vocab().values())
    bound = TokenBound(backend, pieces)
    assert bound.at_least("q" * 1000 * longest) == 1000
    assert bound.at_least("q" * (1000 * longest + 1)) == 1001


def test_a_text_that_is_far_too_long_is_not_tokenised(chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "some words " * 200_000
    messages = [{"role": "user", "content": text}]

    class Untouched:
        normalizer = None

        def encode(self, *_: object, **__: object) -> object:
            raise AssertionError("it was tokenised")

        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

    backend = chatml._backend
    chatml._check_length(text[:50], 10)  # the bound is computed once
    monkeypatch.setattr(chatml, "_backend", Untouched())
    with pytest.raises(CapacityError, match=r"the context holds 100 tokens, but the prompt has at least \d+ tokens"):
        chatml.encode(text, max_tokens=100)
    with pytest.raises(CapacityError, match=r"holds 100 tokens, .* at least \d+ tokens"):
        chatml.encode_conversation(messages, {}, max_tokens=100)


def test_a_text_that_may_fit_is_tokenised(chatml: Tokenizer) -> None:
    ids = chatml.encode("some words " * 50)
    assert chatml.encode("some words " * 50, max_tokens=len(ids)) == ids
    messages = [{"role": "user", "content": "hi"}]
    assert chatml.encode_conversation(messages, {}, max_tokens=50) == chatml.encode_chat(messages)


@pytest.mark.parametrize("name", ["self", "messages"])
def test_names_that_are_not_the_callers_are_refused(chatml: Tokenizer, name: str) -> None:
    for method in (chatml.render_chat, chatml.encode_chat):
        with pytest.raises(RequestError, match=name) as error:
            method([{"role": "user", "content": "hi"}], **{name: 1})
        assert error.value.field == "chat_template_kwargs"
    with pytest.raises(RequestError, match="add_generation_prompt"):
        chatml.encode_conversation([{"role": "user", "content": "hi"}], {"add_generation_prompt": 1})
