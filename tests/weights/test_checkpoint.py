"""Opening a checkpoint: which file is read, and what a configuration says that comes from tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plait
from plait.cli.main import main
from plait.errors import ConfigError, UsageError
from plait.text.tokenizer import load_tokenizer
from plait.weights.checkpoint import open_checkpoint, read_config
from tests.gguf_files import tiny_llama, write_gguf
from tests.tiny import tiny_model_dir

DIVISORS = (1.0, 2.5, 4.0, 8.0)
ROPE_FREQS = {"rope_freqs.weight": np.array(DIVISORS, np.float32)}


def gemma3(path: Path) -> Path:
    """The header of a file with 7 layers; no weights are read here."""
    keys: dict[str, Any] = {
        "block_count": 7,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 16,
    }
    tensors = {"token_embd.weight": np.zeros((48, 32)), **ROPE_FREQS}
    return write_gguf(path, {f"gemma3.{key}": value for key, value in keys.items()}, tensors, "gemma3")


def test_stored_divisors_are_part_of_the_configuration(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "model.gguf", tensors=ROPE_FREQS)
    assert open_checkpoint(path).config.rotary[0].divisors == DIVISORS
    assert read_config(path) == open_checkpoint(path).config
    assert read_config(tiny_llama(tmp_path / "plain.gguf")).rotary[0].divisors is None


def test_they_concern_the_table_of_full_attention_alone(tmp_path: Path) -> None:
    config = open_checkpoint(gemma3(tmp_path / "model.gguf")).config
    assert [table.divisors for table in config.rotary] == [DIVISORS, None]
    windows = {layer.attention.rotary.table: layer.attention.window for layer in config.layers}
    assert windows == {0: 0, 1: 16}


def test_the_forward_uses_them(tmp_path: Path) -> None:
    decoder = plait.load(tiny_llama(tmp_path / "model.gguf", tensors=ROPE_FREQS), "fp32")
    plain = plait.load(tiny_llama(tmp_path / "plain.gguf"), "fp32")
    found, without = (np.array(d.rotary_tables[0].inv_freq) for d in (decoder, plain))
    assert found == pytest.approx(without / np.array(DIVISORS))


def test_inspect_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_llama(tmp_path / "model.gguf", tensors=ROPE_FREQS))]) == 0
    assert "divisors from the file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stored", "said"),
    [(np.array([1.0, 0.0, 1.0, 1.0]), "must hold positive numbers"), (("F16", np.ones(4)), "stored as F16")],
)
def test_divisors_that_divide_nothing_are_refused(tmp_path: Path, stored: Any, said: str) -> None:
    path = tiny_llama(tmp_path / "model.gguf", tensors={"rope_freqs.weight": stored})
    with pytest.raises(ConfigError, match=said):
        open_checkpoint(path)


def test_a_configuration_is_read_without_weights(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    whole = read_config(directory)
    (directory / "model.safetensors").unlink()
    assert read_config(directory) == read_config(directory / "config.json") == whole
    (directory / "config.json").unlink()
    with pytest.raises(UsageError, match=r"config\.json"):
        read_config(directory)


def test_a_file_of_a_directory_has_its_tokenizer_and_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_model_dir(tmp_path)
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    tokenizer = load_tokenizer(directory / "other.safetensors")
    assert tokenizer.encode("abc") == load_tokenizer(directory).encode("abc")
    assert main(["inspect", str(directory / "other.safetensors"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] and facts["tokenizer"]["tokens"] == tokenizer.vocab_size
    plait.load(directory / "other.safetensors").save_pretrained(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").encode("abc") == tokenizer.encode("abc")


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    (directory / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json must hold a JSON object, not a list"):
        _ = open_checkpoint(directory).generation_defaults
