"""Small SentencePiece models, trained here with the `sentencepiece` package, which is the oracle for them too."""

from __future__ import annotations

import io
import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

FIXTURES = Path(__file__).parents[1] / "fixtures"


@cache
def lines() -> list[str]:
    """2,000 lines: all scripts, emoji, spaces, newlines, code, numbers."""
    with lzma.open(FIXTURES / "tokenizer_lines.json.xz", "rt", encoding="utf-8") as file:
        return json.load(file)


def train(**options: Any) -> bytes:
    """The model file that sentencepiece trains on a part of `lines`."""
    out = io.BytesIO()
    options = {
        "model_type": "bpe",
        "vocab_size": 3000,
        "character_coverage": 0.98,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        **options,
    }
    sentences = [part for line in lines()[::5] for part in line.split("\n")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=out, num_threads=1, minloglevel=2, **options
    )
    return out.getvalue()


def write(folder: Path, model: bytes, **files: Any) -> Path:
    """A model directory: tokenizer.model, and NAME.json for each of `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def processor(model: bytes) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=model)
