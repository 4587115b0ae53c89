from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from plait.text.tokenizer import Tokenizer, load_tokenizer
from tests.text import small_tokenizers as small

# How long an example takes says something of the machine's load and nothing of the code.
settings.register_profile("plait", deadline=None)
settings.load_profile("plait")


@pytest.fixture(scope="session")
def chatml_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": small.CHATML}
    return small.write(tmp_path_factory.mktemp("chatml"), small.byte_level(), config)


@pytest.fixture(scope="session")
def chatml(chatml_directory: Path) -> Tokenizer:
    return load_tokenizer(chatml_directory)


@pytest.fixture(scope="session")
def sentencepiece_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": small.WITH_BOS}
    return small.write(tmp_path_factory.mktemp("sp"), small.with_bos(small.metaspace(), "<s>"), config)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_directory: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_directory)
