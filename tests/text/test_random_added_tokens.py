"""Random combinations of the files that describe added tokens: every one is read as transformers reads it, or refused.

The oracle is the table of added tokens inside transformers' tokenizer, ids and flags. Where it names a token as special
and forgets to mark it, ours may be marked: what a model's files call special is left out of texts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from plait.errors import TokenizerError
from plait.text.tokenizer import load_tokenizer
from tests.text import small_sentencepiece, small_tokenizers
from tests.text.test_byte_level_files import KIMI_NAMES, ranks, vocab_size, write_ranks, write_vocab

TOKENS = ["<a>", "<b>", "<im>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "the"]
STANDARD = ["pad_token", "mask_token", "cls_token", "bos_token", "eos_token", "unk_token"]
OWN = ["image_token", "video_token", "eot_token"]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
COUNT = 60
Files = dict[str, Any]


class Combination:
    """Files of one seed. size: of the vocabulary, where added tokens begin. raw: tokens are found before
    normalisation, as in what plait makes of a SentencePiece model. hole: whether an id lies beyond the next one."""

    def __init__(self, seed: str, size: int, raw: bool = False) -> None:
        self._rng, self._size, self._raw = random.Random(seed), size, raw
        self.hole = False
        self.files = self._files()

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _object(self, text: str, typed: bool = True) -> Files:
        flags = {flag: self._chance(0.4) for flag in FLAGS if self._chance(0.6)}
        if self._raw:
            flags["normalized"] = False
        return ({"__type": "AddedToken"} if typed else {}) | {"content": text, **flags}

    def _token(self, text: str, typed: bool = True) -> Any:
        return text if self._chance(0.6) else self._object(text, typed)

    def _ids(self) -> dict[str, int]:
        gap = self._chance(0.1)
        self.hole |= gap
        texts = self._rng.sample(TOKENS[:6], self._rng.randint(1, 4))
        return {text: self._size + gap + place for place, text in enumerate(texts)}

    def _names(self, most: int, typed: bool = True) -> Files:
        names = self._rng.sample([*STANDARD, *OWN], self._rng.randint(0, most))
        return {name: self._token(self._rng.choice(TOKENS), typed) for name in names}

    def _list(self) -> list[Any]:
        return [self._token(text) for text in self._rng.sample(TOKENS, self._rng.randint(0, 3))]

    @property
    def listed(self) -> set[str]:
        lists = [files.get("additional_special_tokens", []) for files in self.files.values()]
        return {token if isinstance(token, str) else token["content"] for found in lists for token in found}

    def _files(self) -> Files:
        config, files = self._names(4), {}
        if self._chance(0.15):
            config[self._rng.choice(STANDARD)] = None
        described = self._chance(0.5)
        if described:
            ids = self._ids()
            config["added_tokens_decoder"] = {str(id): self._object(text, typed=False) for text, id in ids.items()}
        if self._chance(0.35):
            hole = self.hole
            files["added_tokens"] = self._ids()
            self.hole = hole if described else self.hole  # the file is not read then
        if self._chance(0.4):
            config["additional_special_tokens"] = self._list()
        if self._chance(0.2):
            config["extra_special_tokens"] = self._list()
        elif self._chance(0.2):
            names = self._rng.sample(["image_token", "audio_token", "boi_token"], 2)
            config["extra_special_tokens"] = {name: self._rng.choice(TOKENS) for name in names}
        if self._chance(0.4):
            files["special_tokens_map"] = self._names(3, typed=False)
            if self._chance(0.4):
                texts = self._rng.sample(TOKENS, self._rng.randint(1, 2))
                files["special_tokens_map"]["additional_special_tokens"] = texts
        return {"tokenizer_config": config, **files}


def table(backend: Any) -> dict[str, tuple[int, dict[str, bool]]]:
    """Id and flags of every added token."""
    return {
        token.content: (id, {flag: getattr(token, flag) for flag in FLAGS})
        for id, token in backend.get_added_tokens_decoder().items()
    }


def assert_same(folder: Path, oracle: Any, special: set[str], beside: set[str]) -> None:
    """special: texts that may be special here alone; beside: tokens that may be there here alone."""
    plait = load_tokenizer(folder)
    ours, theirs = table(plait._backend), table(oracle.backend_tokenizer)
    special = special | set(oracle.all_special_tokens)
    assert ours.keys() - beside == theirs.keys() - beside
    for text, (id, flags) in theirs.items():
        own_id, own = ours[text]
        assert own_id == id, text
        assert own == flags or (text in special and own == flags | {"special": True}), text
    for text in TOKENS:
        prompt = f"x {text} y{text}z  {text}"
        assert plait.encode(prompt, add_bos=False) == oracle.encode(prompt, add_special_tokens=False), prompt


def check_all(
    kind: str, size: int, folder: Path, write: Callable[[Path, Files], Any], load: Any, **options: Any
) -> None:
    refused = 0
    for seed in range(COUNT):
        combination = Combination(f"{kind} {seed}", size, options.get("raw", False))
        place = folder / str(seed)
        write(place, json.loads(json.dumps(combination.files)))
        try:
            special = options.get("special", set()) | combination.listed
            assert_same(place, load(place), special, options.get("beside", set()))
        except TokenizerError as error:
            late = "additional_special_tokens has" in str(error) and options.get("raw")
            assert late or (combination.hole and "was added as token" in str(error)), (combination.files, error)
            refused += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {combination.files}") from error
        else:
            assert not combination.hole or kind == "tokenizer.json", combination.files
    assert refused <= COUNT / 4


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_beside_vocab_json(tmp_path: Path, name: str) -> None:
    def write(folder: Path, files: Files) -> None:
        files["tokenizer_config"]["tokenizer_class"] = name
        write_vocab(folder, **files)

    check_all(name, vocab_size(), tmp_path, write, AutoTokenizer.from_pretrained)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_beside_a_sentencepiece_model(tmp_path: Path, kind: str) -> None:
    """Its control pieces are found in texts whatever the files name; transformers has them where nothing else is."""
    model = small_sentencepiece.train(model_type=kind, byte_fallback=True)
    size = small_sentencepiece.processor(model).get_piece_size()

    def write(folder: Path, files: Files) -> None:
        small_sentencepiece.write(folder, model, **files)

    check_all(kind, size, tmp_path, write, TokenizersBackend.from_pretrained, raw=True, beside={"<s>", "</s>", "<unk>"})


@pytest.mark.filterwarnings("ignore:the tokenizer's files disagree")
def test_beside_tokenizer_json(tmp_path: Path) -> None:
    def write(folder: Path, files: Files) -> None:
        small_tokenizers.write(folder, small_tokenizers.byte_level(), files.pop("tokenizer_config"), **files)

    marked = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}  # in tokenizer.json; they stay so
    check_all("tokenizer.json", 445, tmp_path, write, AutoTokenizer.from_pretrained, special=marked)


def test_beside_tiktoken_ranks(tmp_path: Path) -> None:
    """transformers cuts words elsewhere, but numbers the tokens behind the ranks; lists it puts before names."""
    tokens = ranks()
    for seed in range(8):
        config = Combination(f"ranks {seed}", len(tokens)).files["tokenizer_config"]
        names = {name: token for name, token in config.items() if name in (*STANDARD, *OWN) and token}
        decoder = {str(len(tokens) + place): {"content": text, "special": True} for place, text in KIMI_NAMES.items()}
        decoder[str(len(tokens) + 255)] = {"content": "<last>", "special": seed % 2 == 0}
        folder = write_ranks(tmp_path / str(seed), tokens, **names, added_tokens_decoder=decoder)
        oracle = TokenizersBackend.from_pretrained(folder)
        assert table(load_tokenizer(folder)._backend) == table(oracle.backend_tokenizer)
