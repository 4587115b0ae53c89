"""--adapter on the command line: generate, chat, score and inspect --trace of a model with an adapter."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.cli.main import main
from plait.weights.merge import merge_adapter
from tests.adapters import write_adapter
from tests.tiny import tiny_model_dir

COMMON = ["--threads", "1", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def adapters(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    decoder, folder = plait.load(model, "fp32"), tmp_path_factory.mktemp("adapters")
    return [str(write_adapter(folder / name, decoder, seed=i)) for i, name in enumerate(("first", "second"))]


@pytest.fixture(scope="module")
def merged(model: str, adapters: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model with the first adapter in its weights."""
    decoder = plait.load(model, "fp32")
    merge_adapter(decoder, adapters[0])
    directory = tmp_path_factory.mktemp("merged")
    decoder.save_pretrained(directory)
    return str(directory)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, *COMMON, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_writes_what_the_merged_model_writes(
    model: str, adapters: list[str], merged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["-p", "Hello", "-n", "12", "--temperature", "0"]
    expected = run(capsys, "generate", merged, *prompt)
    found = run(capsys, "generate", model, *prompt, "--adapter", adapters[0])
    assert found["token_ids"] == expected["token_ids"] and found["adapter"] == "first"
    named = run(capsys, "generate", model, *prompt, "--adapter", f"mine={adapters[0]}", "--plan", "reference")
    assert named["token_ids"] == expected["token_ids"] and named["adapter"] == "mine"
    plain = run(capsys, "generate", model, *prompt)
    assert plain["token_ids"] != expected["token_ids"] and "adapter" not in plain


def test_score_scores_with_the_adapter(
    model: str, adapters: list[str], merged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the clocks were striking thirteen")
    expected = run(capsys, "score", merged, str(text))["nll"]
    for plan in ("auto", "reference"):
        found = run(capsys, "score", model, str(text), "--adapter", adapters[0], "--plan", plan)
        assert found["nll"] == pytest.approx(expected, rel=1e-5) and found["adapter"] == "first"
    assert run(capsys, "score", model, str(text))["nll"] != pytest.approx(expected, rel=1e-2)


def test_a_trace_is_of_the_merged_weights(
    model: str, adapters: list[str], merged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = [
        run(capsys, "inspect", *argv, "--trace", "Hello")["next"]
        for argv in ((merged,), (model, "--adapter", adapters[0]), (model,))
    ]
    assert traces[0] == traces[1] != traces[2]


def test_a_chat_goes_on_with_another_adapter(
    model: str, adapters: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["one", "/reset", "/adapter second", "one", "/reset", "/adapter none", "one", "/adapter third", "/adapter"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    flags = [part for path in adapters for part in ("--adapter", path)]
    assert main(["chat", model, *COMMON, *flags, "--temperature", "0", "-n", "8"]) == 0
    captured = capsys.readouterr()
    answers = captured.out.encode().split(b"\n")
    assert len(set(captured.out)) > 3 and len(answers) >= 3
    assert "adapter: second" in captured.err and "adapter: none" in captured.err
    assert "there is no adapter 'third'; loaded: first, second" in captured.err
    # Every answer is what generate gives for the same prompt.
    told = ["generate", model, "-p", "one", "--chat", "--temperature", "0", "-n", "8"]
    texts = [run(capsys, *told, "--adapter", path)["text"] for path in adapters] + [run(capsys, *told)["text"]]
    assert len(set(texts)) == 3
    assert captured.out == "".join(text + "\n" for text in texts)
