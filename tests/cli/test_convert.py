"""`plait convert`: arguments, the report, and what is printed where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.weights.gguf_source import GGUFSource
from tests.weights.converting import config_of, model_directory


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = model_directory(tmp_path, "qwen3")
    file = tmp_path / "model.gguf"
    assert main(["convert", str(directory), str(file), "--type", "q4_k_m", "--threads", "1"]) == 0
    printed = capsys.readouterr()
    assert str(file) in printed.out and "Q5_0 instead of Q4_K" in printed.out and not printed.err
    assert main(["convert", str(file), str(tmp_path / "back"), "--type", "hf", "--json", "--shard-size", "50kB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "hf" and report["expanded"] and report["seconds"] > 0
    assert sum(kind["tensors"] for kind in report["types"].values()) == report["tensors"]
    assert report["bytes"] == sum(p.stat().st_size for p in (tmp_path / "back").iterdir())
    assert config_of(tmp_path / "back") == config_of(directory)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1


def test_without_a_tokenizer(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "llama")
    assert main(["convert", str(directory), str(tmp_path / "x.gguf"), "--no-tokenizer"]) == 0
    assert GGUFSource(tmp_path / "x.gguf").metadata["tokenizer.ggml.model"] == "none"
    assert main(["convert", str(directory), str(tmp_path / "x"), "--no-tokenizer"]) == 0
    assert not (tmp_path / "x" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x.gguf", "--type", "q4_k_l"], "--type q4_k_l is unknown; choose auto, hf, f32, "),
        (["x", "--type", "q8_0"], "ending .gguf"),
        (["x.gguf", "--shard-size", "1GB"], "--shard-size is of a Hugging Face directory"),
        (["x", "--shard-size", "no"], "no amount of memory"),
        (["x", "--shard-size", "0"], "at least one byte"),
        (["x", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["x.gguf", "--dtype", "bf16"], "with --type"),
        ([], "the following arguments are required: DST"),
        (["x.gguf", "--quantize"], "has no flag --quantize"),
    ],
)
def test_wrong_arguments_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / word) if word[0] == "x" else word for word in words]
    assert main(["convert", str(tmp_path / "none"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_target_is_replaced_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, file = model_directory(tmp_path, "llama"), tmp_path / "x.gguf"
    file.write_bytes(b"precious")
    assert main(["convert", str(directory), str(file)]) == 2
    assert "--force" in capsys.readouterr().err and file.read_bytes() == b"precious"
    assert main(["convert", str(directory), str(file), "--force"]) == 0
    assert GGUFSource(file).names()
