"""Tokenizers that are trained here: ids, round trip, and that transformers reads what is written."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.text.tokenizer import Tokenizer, load_tokenizer
from plait.training.data.tokenizers import from_json, train_tokenizer

TEXTS = [
    "The kettle sings while rain walks down the window, and nobody counts the drops.",
    "Ấm nước reo khi mưa đi xuống cửa sổ, và không ai đếm từng giọt.",
    "雨が窓をつたうあいだ、やかんが歌い、だれもしずくを数えない。",
    "def drops(window):\n    return [d for d in window if d.falls]\n",
] * 4


@cache
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, 400, ["vi", "ja"])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return trained()


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    names = ["<pad>", "<eos>", "<sep>", "<vi>", "<ja>"]
    assert [tokenizer.special_token_id(name) for name in names] == [0, 1, 2, 3, 4]
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert (tokenizer.pad_token_id, tokenizer.eos_token_ids) == (0, {1})
    assert sorted(tokenizer.token_bytes(id) for id in range(5, 261)) == [bytes([byte]) for byte in range(256)]
    assert tokenizer.vocab_size == 400


@given(st.text())
def test_decoding_gives_the_text_in_nfc(text: str) -> None:
    tokenizer = trained()
    ids = tokenizer.encode_plain(text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert not set(ids) & tokenizer.special_ids


@given(
    st.lists(st.sampled_from(["<eos>", "<EOS>", "<sep", ">", "<", "<vi>", " a", "be\u0323\u0302nh", "\n"]), max_size=9)
)
def test_text_that_reads_like_a_special_token_is_text(parts: list[str]) -> None:
    tokenizer = trained()
    text = "".join(parts)
    ids = tokenizer.encode_plain(text)
    assert not set(ids) & tokenizer.special_ids
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert tokenizer.encode_plain_batch([text, "", *parts]) == [tokenizer.encode_plain(t) for t in (text, "", *parts)]


def test_no_space_is_put_before_a_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.encode_plain("The")[0])[:1] == b"T"


def test_both_normal_forms_have_the_same_ids(tokenizer: Tokenizer) -> None:
    nfc, nfd = "b\u1ec7nh", "be\u0323\u0302nh"
    assert len(nfc) == 4 and len(nfd) == 6
    assert tokenizer.encode_plain(nfc) == tokenizer.encode_plain(nfd)


def test_the_same_texts_give_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    again = train_tokenizer(iter(TEXTS), 400, ["vi", "ja"])
    assert again.specification() == tokenizer.specification()


def test_few_texts_give_fewer_entries() -> None:
    # "aaaa" gives the merges aa and aaaa, beyond 3 special tokens and 256 bytes.
    assert train_tokenizer(["aaaa"] * 3, 1000).vocab_size == 3 + 256 + 2


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size 260 has no room for merges: 4 special tokens and 256 bytes"):
        train_tokenizer(TEXTS, 260, ["vi"])


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("text", ["The kettle", "mưa <eos> rơi", "be\u0323\u0302nh", "  窓\n\n"])
def test_what_is_written_is_read_by_plait_and_by_transformers(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    ours = load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode(text) == tokenizer.encode(text) == theirs(text)["input_ids"]
    assert ours.encode_plain(text) == tokenizer.encode_plain(text)
    assert (ours.pad_token_id, ours.eos_token_ids, ours.special_ids) == (0, {1}, tokenizer.special_ids)
    assert (theirs.pad_token_id, theirs.eos_token_id, len(theirs)) == (0, 1, 400)
    assert set(theirs.all_special_ids) == tokenizer.special_ids
    assert theirs.decode(theirs(text)["input_ids"]) == unicodedata.normalize("NFC", text)
    assert ours.chat_template is None


def test_it_is_rebuilt_from_its_json(tokenizer: Tokenizer) -> None:
    again = from_json(json.dumps(tokenizer.specification()))
    assert again.encode_plain(TEXTS[1]) == tokenizer.encode_plain(TEXTS[1])
