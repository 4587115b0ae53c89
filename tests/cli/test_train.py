"""`plait train` from the command line: a run from nothing, going on, what is refused, and the run as a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli.main import main
from tests.training.kills import TEXT

RECIPE = f"""
model: {{model_type: llama, vocab_size: auto, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
  num_attention_heads: 2, max_position_embeddings: 32, tie_word_embeddings: true}}
data: {{sources: [{{path: {TEXT}, per: line}}], splits: {{valid: 0.2}}, context: 32, tokenizer: {{vocab_size: 300}}}}
train: {{tokens: 1_500, batch_tokens: 256, precision: fp32}}
sample: {{every_tokens: 1_000, max_tokens: 4}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def test_a_run_from_nothing_is_a_model_at_once(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(recipe), f"out={out}", "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["tokens"] >= 1_500 and summary["best"]["loss"] > 0 and Path(summary["checkpoint"]).is_dir()
    assert "best validation loss" in captured.err and "-> " in captured.err  # a sample of the live weights
    assert main(["generate", str(out), "-p", "Emma", "-n", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["convert", str(out), str(tmp_path / "run.gguf")]) == 0
    assert main(["inspect", str(out), "--json"]) == 0
    assert main(["generate", str(tmp_path / "run.gguf"), "-p", "Emma", "-n", "3"]) == 0
    capsys.readouterr()
    assert main(["train", str(out)]) == 0  # finished: nothing is left to do
    assert f"goes on from step {summary['steps']}" in capsys.readouterr().err


def test_the_resolved_configuration_is_shown(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--show", "optimizer.lr=3e-4"]) == 0
    assert "lr: 0.0003" in capsys.readouterr().out
    assert main(["train", str(recipe), "--show", "--json", "seed=7"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian.tokens=5"], "trian: there is no such key; did you mean train?"),
        (["optimizer.name=adamm"], "'adamm'; did you mean 'adamw'?"),
        (["optimizer.options.beta=0.9"], "beta"),
        (["data.context=64"], "longer than the model's 32 positions"),
        (["model.vocab_size=100"], "more than the model's vocab_size=100"),
        (["model.hiden_size=8"], "hiden_size"),
        (["data.sources=[{path: nowhere.txt}]"], "nowhere.txt"),
        (["log.services=[tensorbord]"], "tensorboard, wandb, trackio"),
        (["train.batch_tokens=16"], "no room for the longest example"),
        (["device=tpu"], "device"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    status = main(["train", str(recipe), f"out={tmp_path / 'run'}", *words])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert status in (1, 2) and last.startswith("plait: error: ") and said in last


def test_a_section_that_does_nothing_is_said(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}", "experts.balance=0.1", "train.tokens=100"]) == 0
    assert "this model has no mixture" in capsys.readouterr().err


def test_a_run_that_could_learn_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRN-07: a context that cuts every target off."""
    table = tmp_path / "pairs.tsv"
    rows = [f"s{i}\tthe same long source text of pair number {i} over and over\tein Text {i}" for i in range(60)]
    table.write_text("id\ten\tde\n" + "\n".join(rows) + "\n")
    recipe = tmp_path / "cut.yaml"
    recipe.write_text(
        RECIPE.split("data:")[0]
        + f"data: {{task: translation, sources: [{{path: {table}, source: en, target: de, id: id}}], context: 4,"
        " too_long: truncate, tokenizer: {vocab_size: 300}}\ntrain: {tokens: 100, batch_tokens: 64}\n"
    )
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 1
    assert "has a target: is data.context too short" in capsys.readouterr().err
