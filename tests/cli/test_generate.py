"""`plait generate`: prompts in, text on stdout, speeds on stderr."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from tests.tiny import IM_END, tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("models")))


def generate(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["generate", *argv, "--threads", "1", "--dtype", "fp32", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_text_streams_to_stdout_and_speeds_go_to_stderr(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "-p", "Hello", "-n", "8", "--seed", "3", "--threads", "1", "--dtype", "fp32"]) == 0
    captured = capsys.readouterr()
    assert captured.out == generate(capsys, model, "-p", "Hello", "-n", "8", "--seed", "3")["text"] + "\n"
    assert "prefill 5 tokens, " in captured.err and "decode 8 tokens, " in captured.err
    assert "room for" in captured.err


def test_greedy_equals_taking_the_largest_logit_by_hand(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    import plait

    found = generate(capsys, model, "-p", "Hello", "-n", "12", "--temperature", "0")
    decoder = plait.load(model, "fp32")
    ids = list(b"Hello")
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(decoder.logits(decoder(torch.tensor(ids))[-1]).argmax()))
    assert found["token_ids"] == ids[5:]
    assert (found["finish_reason"], found["prompt_tokens"], found["completion_tokens"]) == ("length", 5, 12)


def test_the_same_seed_gives_the_same_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (model, "-p", "Hello", "-n", "12", "--temperature", "1.5")
    first, again, other = (generate(capsys, *flags, "--seed", seed) for seed in ("1", "1", "2"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_chat_applies_the_template(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = generate(capsys, model, "--chat", "--system", "S", "-p", "Hi", "-n", "1")
    rendered = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    # Four control tokens of one id each, everything else bytes.
    assert found["prompt_tokens"] == len(rendered) - 3 * len("<|im_start|>") - 2 * len("<|im_end|>") + 5


@pytest.mark.parametrize("text", ["[72, 101, 108]", "72 101 108\n", "72,101,\n108"])
def test_ids_are_a_prompt(text: str, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    found = generate(capsys, model, "--ids", str(file), "-n", "4", "--temperature", "0")
    assert found["token_ids"] == generate(capsys, model, "-p", "Hel", "-n", "4", "--temperature", "0")["token_ids"]


@pytest.mark.parametrize("text", ["", "[]", "[1.5]", "[true]", "1 two", "-3", "{}"])
def test_ids_that_are_none_are_refused(
    text: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert main(["generate", model, "--ids", str(file)]) == 2
    assert "must hold token ids" in capsys.readouterr().err


def test_a_prompt_from_a_file_or_standard_input(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße", encoding="utf-8")
    flags = ("-n", "4", "--temperature", "0")
    expected = generate(capsys, model, "-p", "Grüße", *flags)["token_ids"]
    assert generate(capsys, model, "--prompt-file", str(file), *flags)["token_ids"] == expected
    stdin(monkeypatch, "Grüße".encode())
    assert generate(capsys, model, "--prompt-file", "-", *flags)["token_ids"] == expected
    stdin(monkeypatch, b"\xff\xfe")
    assert main(["generate", model, "--prompt-file", "-"]) == 2
    assert "not UTF-8 text (byte 0)" in capsys.readouterr().err


def test_a_stop_string_ends_the_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (model, "-p", "Hello", "-n", "40", "--temperature", "0")
    text = generate(capsys, *flags)["text"]
    stop = text[10:12]
    found = generate(capsys, *flags, "--stop", stop, "--stop", "never to be seen")
    assert found["text"] == text[: text.index(stop)]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


def test_the_checkpoints_sampling_defaults_apply_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny_model_dir(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": IM_END}))
    flags = (str(directory), "-p", "Hello", "-n", "16", "--seed", "5")
    greedy = generate(capsys, *flags, "--temperature", "0")["token_ids"]
    assert generate(capsys, *flags)["token_ids"] == greedy
    assert generate(capsys, *flags, "--temperature", "2")["token_ids"] != greedy
    assert generate(capsys, *flags, "--generation-config", "none")["token_ids"] != greedy


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "-p", "x" * 600, "--threads", "1"]) == 2
    assert "600" in capsys.readouterr().err


def test_chat_without_a_template_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_model_dir(tmp_path, chat=False)
    for argv in (["generate", str(directory), "--chat", "-p", "x"], ["chat", str(directory)]):
        assert main([*argv, "--threads", "1"]) == 1
        assert "no chat template" in capsys.readouterr().err


@pytest.mark.real_model
@pytest.mark.slow
def test_the_default_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "The capital of France is", "-n", "6", "--temperature", "0"]) == 0
    assert "Paris" in capsys.readouterr().out
