"""Directories with `vocab.json` and `merges.txt`, or with `tiktoken.model`: the ids of transformers and tiktoken."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from transformers import AutoTokenizer, GPT2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from plait.errors import TokenizerError
from plait.plan.cache import model_files
from plait.text.detokenizer import byte_of_printable
from plait.text.pretokenizers import pre_tokenizer
from plait.text.tokenizer import Tokenizer, load_tokenizer
from plait.text.tokenizer_files import facts_of_files
from tests.text import small_sentencepiece, small_tokenizers
from tests.text.small_sentencepiece import lines

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_vocab(folder: Path, merges_head: str = "#version: 0.2\n", **files: Any) -> Path:
    """vocab.json and merges.txt of a small byte-level BPE, and NAME.json for each of `files`."""
    spec = json.loads(small_tokenizers.byte_level().to_str())
    vocabulary = spec["model"]["vocab"]
    vocabulary |= {"<|endoftext|>": len(vocabulary)}
    folder.mkdir(parents=True, exist_ok=True)
    merges = "".join(f"{left} {right}\n" for left, right in spec["model"]["merges"])
    (folder / "merges.txt").write_text(merges_head + merges, encoding="utf-8")
    for name, content in {"vocab": vocabulary, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def vocab_size() -> int:
    return len(json.loads(small_tokenizers.byte_level().to_str())["model"]["vocab"]) + 1


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "GPT2Tokenizer": (GPT2Tokenizer, {}),
    "GPT2TokenizerFast": (GPT2Tokenizer, {"add_prefix_space": True}),
    "Qwen2Tokenizer": (Qwen2Tokenizer, {}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_ids_are_those_of_the_class_in_transformers(tmp_path: Path, name: str) -> None:
    oracle_class, options = CLASSES[name]
    added = {"<|im_start|>": vocab_size(), "<|im_end|>": vocab_size() + 1, "<tool>": vocab_size() + 2}
    decoder = {str(id): {"content": text, "special": text != "<tool>"} for text, id in added.items()}
    config = {"tokenizer_class": name, "added_tokens_decoder": decoder, **options}
    write_vocab(tmp_path, tokenizer_config=config)
    plait, oracle = load_tokenizer(tmp_path), oracle_class.from_pretrained(tmp_path)
    for text in [*lines()[::4], "<|im_start|>user\nhi<|im_end|> <tool>x", "a <|endoftext|>b"]:
        ids = plait.encode(text)
        assert ids == oracle.encode(text), text
        assert plait.decode(ids, False) == oracle.decode(ids), text
    assert plait.eos_token_ids == {vocab_size() - 1} == {oracle.eos_token_id}
    assert plait.vocab_size == vocab_size() + 3


@pytest.mark.parametrize("described", [True, False])
def test_of_files_that_disagree_the_one_that_counts_in_transformers_counts(tmp_path: Path, described: bool) -> None:
    """added_tokens_decoder alone where it is; else special_tokens_map.json before tokenizer_config.json."""
    added = {"<new>": vocab_size()}
    decoder = {str(vocab_size()): {"content": "<own>", "special": True}}
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<own>"} | (
        {"added_tokens_decoder": decoder} if described else {}
    )
    write_vocab(tmp_path, tokenizer_config=config, special_tokens_map={"bos_token": "<new>"}, added_tokens=added)
    plait, oracle = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a<new> b", "a<own> b"):
        assert plait.encode(text, add_bos=False) == oracle.encode(text, add_special_tokens=False)
    assert plait.bos_token_id == oracle.bos_token_id == vocab_size()
    assert plait.token_text(plait.bos_token_id) == ("<own>" if described else "<new>")


@pytest.mark.parametrize(("model_type", "name"), [("qwen3", "qwen2"), ("gpt2", "gpt-2"), (None, "gpt-2")])
def test_without_a_class_the_model_type_decides(tmp_path: Path, model_type: str | None, name: str) -> None:
    plait = load_tokenizer(write_vocab(tmp_path, **({"config": {"model_type": model_type}} if model_type else {})))
    text = "they'LL 12345"
    words = [word for word, _ in pre_tokenizer(name).build().pre_tokenize_str(text)]
    assert plait._backend.pre_tokenizer.pre_tokenize_str(text)[0][0] == words[0]
    assert [word for word, _ in plait._backend.pre_tokenizer.pre_tokenize_str(text)] == words


def test_what_is_saved_loads_in_transformers_with_the_same_ids(tmp_path: Path) -> None:
    plait = load_tokenizer(write_vocab(tmp_path / "in", tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"}))
    plait.save(tmp_path / "out")
    oracle = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(plait.encode(line) == oracle.encode(line) for line in lines()[::20])


BAD_VOCAB: dict[str, tuple[str, str, str]] = {
    "not JSON": ("vocab.json", "{", "vocab.json is not JSON"),
    "list": ("vocab.json", "[1]", "must hold a JSON object"),
    "empty": ("vocab.json", "{}", "must hold a JSON object"),
    "text as id": ("vocab.json", '{"a": "1"}', "'1' is no id of token 'a'"),
    "huge id": ("vocab.json", '{"a": 123456789}', "123456789 is no id of token 'a' among 1"),
    "negative id": ("vocab.json", '{"a": -1}', "-1 is no id"),
    "one id twice": ("vocab.json", '{"a": 0, "b": 0}', "one id to two tokens"),
    "one token twice": ("vocab.json", '{"a": 0, "a": 1}', "names a token twice"),
    "long": ("vocab.json", json.dumps({"a" * 5000: 0}), "token 0 has 5000 characters"),
    "merge of three": ("merges.txt", "#version: 0.2\na b\na b c\n", "merges.txt, line 3: 'a b c' is not a pair"),
    "merge of one": ("merges.txt", "a\n", "line 1: 'a' is not a pair"),
    "unknown merge": ("merges.txt", "zzz qqq\n", "do not fit each other"),
    "not UTF-8": ("merges.txt", "\udcff", "not UTF-8"),
}


@pytest.mark.parametrize(("file", "content", "expected"), BAD_VOCAB.values(), ids=BAD_VOCAB.keys())
def test_bad_files_get_one_line(tmp_path: Path, file: str, content: str, expected: str) -> None:
    write_vocab(tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    message = str(caught.value)
    assert expected in message and str(tmp_path) in message and "\n" not in message and len(message) < 600


def test_an_unknown_class_and_a_missing_half_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="'CLIPTokenizer' is not known for vocab.json"):
        load_tokenizer(write_vocab(tmp_path, tokenizer_config={"tokenizer_class": "CLIPTokenizer"}))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match=r"vocab.json but no merges.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


# tiktoken.model

KIMI_NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 5: "<|im_assistant|>", 7: "<think>"}


def ranks(corpus_step: int = 7) -> list[bytes]:
    """Tokens by rank: the bytes, then what BPE training joins, best first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer("kimi-k2").build()
    alphabet = list(byte_of_printable())
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(lines()[::corpus_step], trainer)
    table = byte_of_printable()
    return [bytes(table[c] for c in backend.id_to_token(id)) for id in range(backend.get_vocab_size())]


def write_ranks(folder: Path, tokens: list[bytes], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_bytes(text)
    decoder = {
        str(len(tokens) + place): {"content": name, "special": name != "<think>"} for place, name in KIMI_NAMES.items()
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    tokens = ranks()
    folder = write_ranks(tmp_path_factory.mktemp("kimi"), tokens, bos_token="[BOS]", eos_token="[EOS]")
    size = len(tokens)
    special = {KIMI_NAMES.get(n, f"<|reserved_token_{size + n}|>"): size + n for n in range(256)}
    encoding = tiktoken.Encoding(
        "kimi",
        pat_str=pre_tokenizer("kimi-k2").rules[0],
        mergeable_ranks=load_tiktoken_bpe(str(folder / "tiktoken.model")),
        special_tokens=special,
    )
    return load_tokenizer(folder), encoding


def test_ids_are_those_of_tiktoken(kimi: tuple[Tokenizer, Any]) -> None:
    plait, oracle = kimi
    for line in [*lines(), "[BOS]<|im_user|>user<|im_end|> <|reserved_token_1700|>"]:
        ids = oracle.encode(line, allowed_special="all")
        assert plait.encode(line) == ids, line
        assert plait.encode_plain(line) == oracle.encode(line, disallowed_special=()), line
        assert plait.decode(ids, skip_special_tokens=False) == line
    assert plait.encode("<think>a</think>") == oracle.encode("<think>a</think>", allowed_special="all")
    assert plait.vocab_size == oracle.n_vocab


@settings(deadline=None)
@given(text=st.text(st.sampled_from("aZéß '’sStTlL09½ \n\r\t_-!?.,你好漢カ한👍🏽\u0301ب[]<|>"), max_size=60))
def test_ids_of_any_text_are_those_of_tiktoken(kimi: tuple[Tokenizer, Any], text: str) -> None:
    plait, oracle = kimi
    assert plait.encode(text) == oracle.encode(text, allowed_special="all")


def test_named_tokens_come_from_the_configuration_and_no_bos_is_added(kimi: tuple[Tokenizer, Any]) -> None:
    plait, oracle = kimi
    assert plait.bos_token_id == oracle.encode_single_token("[BOS]")
    assert plait.eos_token_ids == {oracle.encode_single_token("[EOS]")}
    assert plait.encode("hi") == oracle.encode("hi")
    assert plait.special_token_id("<think>") is None
    assert plait.special_token_id(f"<|reserved_token_{oracle.n_vocab - 1}|>") == oracle.n_vocab - 1


def test_the_class_has_names_of_its_own_for_bos_and_eos(tmp_path: Path) -> None:
    plait = load_tokenizer(write_ranks(tmp_path, ranks()))
    size = plait.vocab_size - 256
    assert (plait.bos_token_id, plait.eos_token_ids) == (size, {size + 1})


def test_a_saved_tiktoken_model_loads_in_transformers(kimi: tuple[Tokenizer, Any], tmp_path: Path) -> None:
    plait, _ = kimi
    plait.save(tmp_path)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    assert all(plait.encode(line) == oracle.encode(line) for line in lines()[::20])


BAD_RANKS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 tokens"),
    "not base64": (b"IQ== 0\n!!! 1\n", "line 2: b'!!! 1' is not a token"),
    "no rank": (b"IQ==\n", "line 1"),
    "negative rank": (b"IQ== -1\n", "line 1"),
    "huge rank": (b"IQ== 99999999999\n", "line 1"),
    "rank twice": (b"IQ== 0\nIg== 0\n", "line 2: rank 0 is there twice"),
    "hole": (b"IQ== 0\nIg== 2\n", "none of rank 1"),
    "token twice": (b"IQ== 0\nIQ== 1\n", "token 1 is '!', which was there before"),
    "no bytes": (b"IQ== 0\n", "tokens for 1 of the 256 bytes"),
    "page": (b"<html>", "HTML page"),
    "long": (base64.b64encode(b"a" * 3000) + b" 0\n", "token 0 has 3000 characters"),
}


@pytest.mark.parametrize(("content", "expected"), BAD_RANKS.values(), ids=BAD_RANKS.keys())
def test_bad_ranks_get_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    write_ranks(tmp_path, [b"a"])
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    message = str(caught.value)
    assert expected in message and "tiktoken.model" in message and "\n" not in message


@pytest.mark.parametrize("name", [None, "QWenTokenizer"])
def test_ranks_without_a_known_class_are_refused_not_guessed(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(TokenizerError, match="not known for tiktoken.model"):
        load_tokenizer(write_ranks(tmp_path, ranks(), tokenizer_class=name))


# Which file counts


def test_tokenizer_json_counts_first_and_disagreement_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "plait.tokenizer")
    backend = small_tokenizers.byte_level()
    small_tokenizers.write(tmp_path, backend, {"eos_token": "<|im_end|>"})
    write_vocab(tmp_path)
    assert load_tokenizer(tmp_path).encode("hello") == backend.encode("hello").ids
    assert caplog.text == ""
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    small_sentencepiece.write(tmp_path, b"\x0a\x00")
    assert load_tokenizer(tmp_path).encode("hello") == backend.encode("hello").ids
    first, second = [record.getMessage() for record in caplog.records]
    assert "tokenizer.model" in first and "tokenizer.json is used" in first
    assert "tokenizer.json and vocab.json disagree about 2 tokens" in second and "\n" not in second


def test_a_model_beside_its_own_tokenizer_json_is_no_disagreement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "plait.tokenizer")
    small_sentencepiece.write(tmp_path, small_sentencepiece.train(byte_fallback=True))
    load_tokenizer(tmp_path).save(tmp_path)
    load_tokenizer(tmp_path)
    assert caplog.text == ""


def test_a_sentencepiece_model_counts_before_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "plait.tokenizer")
    model = small_sentencepiece.train(byte_fallback=True)
    small_sentencepiece.write(write_vocab(tmp_path), model)
    assert load_tokenizer(tmp_path).encode_plain("hello") == small_sentencepiece.processor(model).encode("hello")
    assert "has vocab.json too; tokenizer.model is used" in caplog.text


def test_inspect_tells_kind_and_number_of_tokens(tmp_path: Path) -> None:
    write_vocab(tmp_path / "vocab")
    write_ranks(tmp_path / "ranks", ranks())
    small_sentencepiece.write(tmp_path / "sp", small_sentencepiece.train(model_type="unigram"))
    facts = {name: facts_of_files(tmp_path / name) for name in ("vocab", "ranks", "sp")}
    assert {name: fact and (fact["kind"], fact["file"]) for name, fact in facts.items()} == {
        "vocab": ("BPE", "vocab.json"),
        "ranks": ("tiktoken", "tiktoken.model"),
        "sp": ("SentencePiece unigram", "tokenizer.model"),
    }
    for name, fact in facts.items():
        extra = 256 if name == "ranks" else 0  # inspect counts the file's own
        assert fact and fact["tokens"] + extra == load_tokenizer(tmp_path / name).vocab_size
    (tmp_path / "sp" / "tokenizer.model").write_bytes(b"\x0a\x00")
    damaged = facts_of_files(tmp_path / "sp")
    assert damaged and damaged["kind"] is None and "tokenizer.model" in damaged["problem"]
    assert facts_of_files(tmp_path) is None


def test_a_packed_model_is_old_where_its_tokenizer_changed(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.model", "merges.txt", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    names = {path.name for path in model_files(tmp_path)}
    assert names == {"model.safetensors", "config.json", "tokenizer.model", "merges.txt"}
