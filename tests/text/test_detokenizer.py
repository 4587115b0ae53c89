from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoTokenizer

from plait.errors import RequestError, TokenizerError
from plait.text.detokenizer import IncrementalDetokenizer
from plait.text.tokenizer import Tokenizer, load_tokenizer
from tests.text import small_tokenizers as small

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def deltas(tokenizer: Tokenizer, prompt: list[int], generated: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push([token]) for token in generated), detokenizer.flush()]


@pytest.mark.parametrize("text", ["👍🏽 ok", "Tiếng Việt", "한국어", "naïve café"])
def test_characters_split_over_tokens_come_out_whole(chatml: Tokenizer, text: str) -> None:
    # The small vocabulary has bytes for most of these, so that nearly every character takes several tokens.
    ids = chatml.encode(text)
    pieces = deltas(chatml, [], ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert b"".join(chatml.token_bytes(token) for token in ids) == text.encode()


def test_an_invalid_byte_is_replaced_and_the_rest_goes_on(chatml: Tokenizer) -> None:
    euro = chatml.encode("€")  # e2 82 ac, byte by byte
    assert len(euro) == 3
    assert "".join(deltas(chatml, [], [*euro[:2], *chatml.encode("ab"), *euro])) == "\ufffdab€"


def test_an_incomplete_character_at_the_end_is_replaced_by_flush(chatml: Tokenizer) -> None:
    euro = chatml.encode("€")
    assert deltas(chatml, [], euro[:2]) == ["", "", "\ufffd"]


@given(text=TEXT, generated=TEXT)
def test_deltas_add_up_to_the_decoded_text(chatml: Tokenizer, text: str, generated: str) -> None:
    ids = chatml.encode(generated)
    assert "".join(deltas(chatml, chatml.encode(text), ids)) == chatml.decode(ids)


@given(ids=st.lists(st.integers(0, 440), max_size=30))
def test_deltas_of_any_ids_add_up_to_the_decoded_text(chatml: Tokenizer, ids: list[int]) -> None:
    assert "".join(deltas(chatml, [], ids)) == chatml.decode(ids) == chatml._backend.decode(ids)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_sentencepiece_spaces_are_those_of_the_whole_text(tmp_path: Path, scheme: str) -> None:
    folder = small.write(tmp_path, small.metaspace(scheme), {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer, oracle = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    prompt, whole = oracle("say")["input_ids"], oracle("say hello world !")["input_ids"]
    before = oracle.decode(prompt, skip_special_tokens=True)
    after = oracle.decode(prompt + whole[len(prompt) :], skip_special_tokens=True)
    assert "".join(deltas(tokenizer, prompt, whole[len(prompt) :])) == after[len(before) :]


def test_the_space_before_a_continuation_is_kept_and_that_of_a_beginning_is_not(sentencepiece: Tokenizer) -> None:
    hello = sentencepiece.encode("hello", add_bos=False)
    assert sentencepiece.token_bytes(hello[0]).startswith(b" ")
    assert "".join(deltas(sentencepiece, sentencepiece.encode("hi"), hello)) == " hello"
    assert "".join(deltas(sentencepiece, [sentencepiece.bos_token_id], hello)) == "hello"
    assert "".join(deltas(sentencepiece, [], hello)) == "hello"


def test_special_tokens_are_skipped_or_shown(chatml: Tokenizer) -> None:
    ids = chatml.encode("hi<|im_end|>")
    assert "".join(deltas(chatml, [], ids)) == "hi"
    assert "".join(deltas(chatml, [], ids, skip=False)) == "hi<|im_end|>"
    assert "".join(deltas(chatml, [], ids, skip=False)) == chatml.decode(ids, skip_special_tokens=False)


def test_byte_tokens_of_sentencepiece_join_to_characters(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("xin ơi ☃", add_bos=False)
    assert sentencepiece.token_bytes(3 + 0xE2) == b"\xe2"
    assert "".join(deltas(sentencepiece, [], ids)) == "xin ơi ☃"


def test_a_prompt_that_ends_inside_a_character_is_continued(chatml: Tokenizer) -> None:
    euro = chatml.encode("€")
    assert "".join(deltas(chatml, [*chatml.encode("cost "), *euro[:1]], euro[1:])) == "€"


def test_an_id_outside_the_vocabulary_is_refused_by_number(chatml: Tokenizer) -> None:
    with pytest.raises(RequestError, match=str(chatml.vocab_size)):
        chatml.decode([chatml.vocab_size])


def test_a_tokenizer_without_decoder_joins_words_by_spaces(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = load_tokenizer(small.write(tmp_path, backend, {}))
    assert tokenizer.decode([0, 1, 1]) == backend.decode([0, 1, 1]) == "a b b"


def test_an_unknown_decoder_is_named(tmp_path: Path) -> None:
    from tokenizers import decoders

    backend = small.byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        load_tokenizer(small.write(tmp_path, backend, {}))
