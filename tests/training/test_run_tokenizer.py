"""The tokenizer that a run keeps is the one that it began with, in every end token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from plait.text.tokenizer import load_tokenizer
from plait.training.assemble import _keep_tokenizer
from tests.tiny import tiny_model_dir


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_end_tokens_that_only_another_file_names_go_along(place: str, tmp_path: Path) -> None:
    source, folder = tiny_model_dir(tmp_path, "llama"), tmp_path / "run" / "tokenizer"
    folder.parent.mkdir()
    file = source / place
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**settings, "eos_token_id": [0, 5]}))
    tokenizer = load_tokenizer(source)
    assert {0, 5} <= set(tokenizer.eos_token_ids)
    _keep_tokenizer(folder, tokenizer, source)
    assert load_tokenizer(folder).eos_token_ids == tokenizer.eos_token_ids


def test_half_a_folder_that_a_kill_left_is_written_anew(tmp_path: Path) -> None:
    source, folder = tiny_model_dir(tmp_path, "llama"), tmp_path / "tokenizer"
    for left in (folder, tmp_path / ".tokenizer.writing"):
        left.mkdir()
        shutil.copy(source / "tokenizer_config.json", left)
    tokenizer = load_tokenizer(source)
    _keep_tokenizer(folder, tokenizer, source)
    assert load_tokenizer(folder).eos_token_ids == tokenizer.eos_token_ids
    assert sorted(path.name for path in tmp_path.iterdir() if "tokenizer" in path.name) == ["tokenizer"]
