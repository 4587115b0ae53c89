"""Added tokens that stand beside tokenizer.json: the ids and texts of transformers, whichever file describes them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from plait.errors import TokenizerError
from plait.text.tokenizer import load_tokenizer
from tests.text import small_tokenizers as small

TEXTS = [
    "a <new> b",
    "a<new>b <new>",
    "  <mark>  x <mark>y",
    "x<im>y",
    "Yesterday day daydream",
    "<add> hello <add>",
    "hello<|im_end|> \n",
    "hi <pad> x",
]


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, "special": True, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **flags)}


# small.byte_level() has 445 tokens, one more with <mark>.
FILES: dict[str, dict[str, Any]] = {
    "decoder: a new token": {"tokenizer_config": {"added_tokens_decoder": {"445": token("<new>")}}},
    "decoder: a new token that is text": {
        "tokenizer_config": {"added_tokens_decoder": {"445": token("<new>", special=False)}}
    },
    "decoder: spaces around a known token": {
        "tokenizer_config": {"added_tokens_decoder": {"445": token("<mark>", lstrip=True, rstrip=True)}}
    },
    "decoder: a known token that is text": {
        "tokenizer_config": {"added_tokens_decoder": {"445": token("<mark>", special=False)}}
    },
    "decoder: a word": {
        "tokenizer_config": {"added_tokens_decoder": {"445": token("day", single_word=True, special=False)}}
    },
    "decoder: the map of special tokens is not read": {
        "tokenizer_config": {"added_tokens_decoder": {"445": token("<new>")}},
        "special_tokens_map": {"pad_token": "<pad>"},
        "added_tokens": {"<add>": 446},
    },
    "further special tokens, older key": {"tokenizer_config": {"additional_special_tokens": ["<new>", "<mark>"]}},
    "further special tokens": {"tokenizer_config": {"extra_special_tokens": ["<im>", typed("<mark>", lstrip=True)]}},
    "further special tokens by name": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<im>"}}},
    "a name of the model's own": {"tokenizer_config": {"image_token": "<im>", "video_token": typed("<new>")}},
    "a named token with flags": {"tokenizer_config": {"pad_token": typed("<pad>", lstrip=True)}},
    "a named token that is known keeps its flags": {"tokenizer_config": {"mask_token": "<mark>"}},
    "standard names": {"tokenizer_config": {"mask_token": "<add>", "cls_token": "<new>", "sep_token": "<im>"}},
    "the map of special tokens outranks the configuration": {
        "tokenizer_config": {"pad_token": "<add>", "eos_token": "<|im_start|>"},
        "special_tokens_map": {"pad_token": token("<pad>", rstrip=True), "eos_token": "<|im_end|>"},
    },
    "further special tokens in the map": {
        "tokenizer_config": {},
        "special_tokens_map": {"additional_special_tokens": ["<new>"]},
    },
    "the oldest file": {"tokenizer_config": {"pad_token": "<pad>"}, "added_tokens": {"<add>": 446, "<pad>": 447}},
    "the oldest file says what tokenizer.json says": {"tokenizer_config": {}, "added_tokens": {"<mark>": 445}},
}


def load_both(folder: Path) -> tuple[Any, Any]:
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", FILES)
def test_tokens_of_other_files_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    files = dict(FILES[name])
    mark = AddedToken("<mark>", special=True, normalized=False, rstrip="known" in name)
    backend = small.byte_level(*([mark] if "known" in name or "oldest" in name else []))
    tokenizer, oracle = load_both(small.write(tmp_path, backend, files.pop("tokenizer_config"), **files))
    for text in TEXTS:
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_bos=False) == ids, text
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text
    assert tokenizer.vocab_size == max(oracle.get_vocab().values()) + 1
    assert set(oracle.all_special_ids) <= tokenizer.special_ids
    tokenizer.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)
    assert again.special_ids == tokenizer.special_ids


@pytest.mark.parametrize("named", [{}, {"bos_token": "<s>", "eos_token": "</s>"}, {"bos_token": typed("<s>")}], ids=str)
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("prepends", ["normaliser", "pre-tokeniser"])
def test_the_space_after_a_special_token_is_where_tokenizer_json_puts_it(
    tmp_path: Path, prepends: str, normalized: bool, named: dict[str, Any]
) -> None:
    """Naming a token that is there must not change how it is found."""
    spec = json.loads(small.metaspace("first").to_str())
    if prepends == "normaliser":
        steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
        spec |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    for added in spec["added_tokens"]:
        added["normalized"] = normalized
    backend = Tokenizer.from_str(json.dumps(spec))
    tokenizer, oracle = load_both(small.write(tmp_path, backend, {**named, "legacy": False}))
    for text in ["<s>user\nhi", "a:<s>->", "  <s> x", "hi </s> you<unk>", "a <s>", " hello  world", *small.CORPUS[:6]]:
        assert tokenizer.encode(text, add_bos=False) == oracle(text, add_special_tokens=False)["input_ids"], text


def test_a_token_that_has_another_id_than_the_files_say_is_told(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"495": token("<new>"), "444": token("<|im_end|>")}}
    with pytest.warns(UserWarning, match="the ids of 1 added tokens: '<new>' is 445, not 495"):
        tokenizer = load_tokenizer(small.write(tmp_path, small.byte_level(), config))
    assert tokenizer.encode("<new>") == [445]
    config["added_tokens_decoder"] = {"445": token("<new>")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_tokenizer(small.write(tmp_path, small.byte_level(), config))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": ["<new>"]}}, "added_tokens_decoder .* must be an object"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": token("<new>")}}}, "'x' is no id"),
        ({"tokenizer_config": {"added_tokens_decoder": {"445": "<new>"}}}, "'445' is no id, or its token is none"),
        ({"tokenizer_config": {"added_tokens_decoder": {"445": {"content": "a", "lstrip": 1}}}}, "true or false"),
        ({"tokenizer_config": {"additional_special_tokens": "<new>"}}, "must be a list of tokens, not '<new>'"),
        ({"tokenizer_config": {"extra_special_tokens": [3]}}, "extra_special_tokens .* not 3"),
        ({"tokenizer_config": {"bos_token": 5}}, "bos_token .* must be text or have content, not 5"),
        ({"tokenizer_config": {"bos_token": "\ud800"}}, r"bos_token .* not '\\ud800'"),
        ({"tokenizer_config": {}, "added_tokens": {"<new>": "445"}}, "gives '<new>' the id '445'"),
    ],
)
def test_what_is_no_token_is_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    files = dict(files)
    folder = small.write(tmp_path, small.byte_level(), files.pop("tokenizer_config"), **files)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)


def test_a_template_has_the_names_of_the_model(tmp_path: Path) -> None:
    config = {"image_token": "<im>", "chat_template": "{{ image_token }}{{ messages[0].content }}"}
    tokenizer, oracle = load_both(small.write(tmp_path, small.byte_level(), config))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == oracle.apply_chat_template(messages, tokenize=False) == "<im>hi"
    assert tokenizer.encode_chat(messages)[0] == 445
