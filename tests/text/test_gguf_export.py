"""A tokenizer written as GGUF metadata and read back gives the same ids; what GGUF has no name for is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from plait.errors import TokenizerError
from plait.text.gguf_export import notes, tokenizer_metadata
from plait.text.pretokenizers import PRE_TOKENIZERS
from plait.text.tokenizer import Tokenizer as Ours
from plait.text.tokenizer import load_tokenizer, tokenizer_from_gguf
from tests.real_models import smollm2_path
from tests.text import small_tokenizers as small
from tests.text.test_gguf_tokenizer import LLAMA3_REGEX, QWEN2_REGEX, read_fixture

SPLIT, BYTES = pre_tokenizers.Split, pre_tokenizers.ByteLevel


LINES = read_fixture("tokenizer_lines")


def byte_level(*steps: Any, nfc: bool = False, ignore_merges: bool = False) -> Tokenizer:
    """The small tokenizer with another way of cutting words."""
    backend = small.byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.model.ignore_merges = ignore_merges
    return backend


def ours(backend: Tokenizer, **options: Any) -> Ours:
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return Ours(backend, special_tokens=special, eos_token_ids={backend.token_to_id("<|im_end|>")}, **options)


def values(metadata: dict[str, Any]) -> dict[str, Any]:
    """Without the types that arrays are written with."""
    return {key: value[1] if isinstance(value, tuple) else value for key, value in metadata.items()}


PUBLISHED = {
    "gpt-2": byte_level(BYTES(add_prefix_space=False, use_regex=True)),
    "smollm": byte_level(pre_tokenizers.Digits(individual_digits=True), BYTES(add_prefix_space=False)),
    "llama-bpe": byte_level(
        SPLIT(Regex(LLAMA3_REGEX), "isolated"), BYTES(add_prefix_space=False, use_regex=False), ignore_merges=True
    ),
    "dbrx": byte_level(SPLIT(Regex(LLAMA3_REGEX), "isolated"), BYTES(add_prefix_space=False, use_regex=False)),
    "qwen2": byte_level(
        SPLIT(Regex(QWEN2_REGEX), "isolated"), BYTES(add_prefix_space=False, use_regex=False), nfc=True
    ),
    "deepseek-r1-qwen": byte_level(
        SPLIT(Regex(QWEN2_REGEX), "isolated"), BYTES(add_prefix_space=False, use_regex=False)
    ),
    "olmo": byte_level(BYTES(add_prefix_space=False, use_regex=True), nfc=True),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ways_of_cutting_words_get_their_name(name: str) -> None:
    backend = PUBLISHED[name]
    found = values(tokenizer_metadata(ours(backend), backend.get_vocab_size()))
    assert found["tokenizer.ggml.pre"] == name and found["tokenizer.ggml.model"] == "gpt2"
    again = tokenizer_from_gguf(found)
    for text in small.CORPUS[:6]:
        assert again.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("entry", PRE_TOKENIZERS, ids=lambda e: e.names[0])
def test_every_entry_of_the_table_finds_a_name_of_its_own_rules(entry: Any) -> None:
    backend = byte_level(entry.build(), nfc=entry.nfc, ignore_merges=entry.ignore_merges)
    name = tokenizer_metadata(ours(backend), backend.get_vocab_size())["tokenizer.ggml.pre"]
    (chosen,) = (other for other in PRE_TOKENIZERS if name in other.names)
    assert chosen.ignore_merges == entry.ignore_merges
    theirs, own = chosen.build(), entry.build()  # two expressions may say the same
    for line in LINES[::4]:
        assert theirs.pre_tokenize_str(line) == own.pre_tokenize_str(line)


def test_tokens_types_ids_and_templates() -> None:
    backend = small.byte_level(
        AddedToken("<tool>", special=False, normalized=False), AddedToken("<|eom_id|>", special=True)
    )
    count, end = backend.get_vocab_size(), backend.token_to_id("<|im_end|>")
    others = [backend.token_to_id("<|eom_id|>"), backend.token_to_id("<|endoftext|>")]
    tokenizer = Ours(
        backend,
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        eos_token_ids={end, *others},
        prefix_ids=[backend.token_to_id("<|endoftext|>")],
        chat_templates={"default": small.CHATML, "tool_use": small.WITH_BOS},
    )
    found = values(tokenizer_metadata(tokenizer, count + 3))
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == count + 3
    assert tokens[-1] == f"[PAD{count + 2}]" and types[-3:] == [5, 5, 5]
    assert types[end] == 3 and types[tokens.index("<tool>")] == 4 and types[tokens.index("a")] == 1
    ids = {key.split(".")[-1]: value for key, value in found.items() if key.endswith("_token_id")}
    assert ids == {
        "bos_token_id": others[1],
        "eos_token_id": end,
        "padding_token_id": others[1],
        "eom_token_id": others[0],
        "eot_token_id": others[1],
    }
    assert found["tokenizer.ggml.add_bos_token"] is True
    again = tokenizer_from_gguf(found)
    assert again.eos_token_ids == tokenizer.eos_token_ids and again.chat_templates == tokenizer.chat_templates
    assert again.encode("<tool>x<|im_end|>") == tokenizer.encode("<tool>x<|im_end|>")


@pytest.mark.parametrize("scheme", ["first", "never"])
def test_sentencepiece_like_bpe_gets_scores_that_rank_as_its_merges(scheme: str) -> None:
    backend = every_split(small.metaspace(scheme))
    tokenizer = Ours(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        prefix_ids=[backend.token_to_id("<s>")],
    )
    found = values(tokenizer_metadata(tokenizer, backend.get_vocab_size()))
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_space_prefix"] == (scheme == "first")
    types = found["tokenizer.ggml.token_type"]
    assert types[backend.token_to_id("<unk>")] == 2 and types[backend.token_to_id("<0x41>")] == 6
    again = tokenizer_from_gguf(found)
    for text in [*small.CORPUS, "hello  hello ", "你"] + ["  hello"] * (scheme == "never"):
        assert again.encode(text) == tokenizer.encode(text), text
    assert any("begins with a space" in note for note in notes(tokenizer)) == (scheme == "first")


def every_split(backend: Tokenizer) -> Tokenizer:
    """The same with the merges that a conversion from SentencePiece writes: every pair of tokens that is a token, in
    the order in which training found that token."""
    spec = json.loads(backend.to_str())
    vocabulary, added = spec["model"]["vocab"], {token["content"] for token in spec["added_tokens"]}
    order = dict.fromkeys("".join(pair) for pair in spec["model"]["merges"])
    spec["model"]["merges"] = [
        [text[:cut], text[cut:]]
        for text in order
        for cut in range(len(text) - 1, 0, -1)
        if {text[:cut], text[cut:]} <= vocabulary.keys() - added
    ]
    return Tokenizer.from_str(json.dumps(spec))


def unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0), ("<unk>", -9.0)], unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def no_bytes() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(small.CORPUS, trainers.BpeTrainer(vocab_size=80, special_tokens=["[UNK]"]))
    backend.decoder = decoders.Fuse()
    return backend


def lower_case() -> Tokenizer:
    backend = small.byte_level()
    backend.normalizer = normalizers.Lowercase()
    return backend


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (byte_level(SPLIT(Regex("x+"), "isolated"), BYTES(False, use_regex=False)), "a way that GGUF has no name for"),
        (byte_level(BYTES(add_prefix_space=True)), "a way that GGUF has no name for"),
        (byte_level(BYTES(False), ignore_merges=True), "'gpt-2' does but has ignore_merges, unlike it"),
        (lower_case(), "normalises text with Lowercase"),
        (unigram(), "'Unigram', and plait writes only BPE"),
        (no_bytes(), "neither bytes nor characters"),
        (small.metaspace(), "an order that no scores of tokens give"),
    ],
    ids=["regex", "prefix", "ignore_merges", "lower", "unigram", "no bytes", "some splits"],
)
def test_what_gguf_has_no_name_for_is_refused_with_the_way_out(backend: Tokenizer, message: str) -> None:
    with pytest.raises(TokenizerError, match=rf"tok\.json .*{message}.*--no-tokenizer"):
        tokenizer_metadata(Ours(backend, special_tokens={}), 1000, "tok.json")


def test_more_tokens_than_the_model_embeds_are_refused() -> None:
    backend = small.byte_level()
    count = backend.get_vocab_size()
    with pytest.raises(TokenizerError, match=rf"<\|im_end\|>.* an embedding for {count - 1}"):
        tokenizer_metadata(ours(backend), count - 1)


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_tokenizer_comes_back_from_a_directory(tmp_path: Path) -> None:
    """GGUF -> tokenizer.json -> GGUF."""
    first = load_tokenizer(smollm2_path())
    first.save(tmp_path)
    second = load_tokenizer(tmp_path)
    found = values(tokenizer_metadata(second, first.vocab_size))
    assert found["tokenizer.ggml.pre"] == "smollm"
    again = tokenizer_from_gguf(found)
    for line in LINES[::3]:
        assert again.encode(line) == first.encode(line)
    assert again.special_ids == first.special_ids and again.chat_template == first.chat_template
    assert again.bos_token_id == first.bos_token_id and again.add_bos_token == first.add_bos_token
