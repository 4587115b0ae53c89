"""`plait score`: figures of files, one by one and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from plait.kernels import native
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("models")))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    texts = {"a.txt": "the clocks were striking thirteen", "b.txt": "Grüße aus Köln"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [str(tmp_path / name) for name in texts]


def score(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["score", *argv, "--dtype", "fp32", "--threads", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_totals_are_the_sums_of_the_files(model: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    both = score(capsys, model, *files)
    assert [file["scored_tokens"] for file in both["files"]] == [32, 16]
    assert both["scored_tokens"] == both["bytes"] == 48
    assert both["nll"] == pytest.approx(sum(file["nll"] for file in both["files"]))
    assert both["bos"] is None and both["window"] == 512 and both["stride"] == 256


def test_llm_score_gives_the_same_log_probabilities(
    model: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    import plait

    tokens = score(capsys, model, files[0], "--tokens")["files"][0]["token_logprobs"]
    llm = plait.LLM(model, dtype="fp32", threads=1, kv_memory="8MiB")
    (expected,) = llm.score(Path(files[0]).read_text())
    assert tokens[0]["logprob"] is expected[0] is None
    assert [t["logprob"] for t in tokens[1:]] == pytest.approx(expected[1:], abs=1e-4)
    assert "".join(t["text"] for t in tokens) == Path(files[0]).read_text()


def test_the_print_has_a_row_per_file_and_a_total(
    model: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", model, *files, "--threads", "1", "--tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.count("\t") == 2 for line in lines) == 33 + 17
    assert lines[-1].startswith("total") and lines[-4].startswith("file")


def test_an_empty_file_is_refused_by_name(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    assert main(["score", model, str(path), "--threads", "1"]) == 2
    assert "empty.txt: 0 tokens, nothing to score" in capsys.readouterr().err


def test_the_precision_of_keys_and_values_is_stated_or_refused(
    model: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(capsys, model, files[0], "--plan", "reference")["kv_dtype"] is None
    assert main(["score", model, files[0], "--plan", "reference", "--kv-dtype", "bf16"]) == 2
    assert "--kv-dtype bf16: the reference plan scores without a cache" in capsys.readouterr().err
    if native.native_library() is not None:
        assert score(capsys, model, files[0])["kv_dtype"] == "fp32"
        assert score(capsys, model, files[0], "--kv-dtype", "bf16")["kv_dtype"] == "bf16"
