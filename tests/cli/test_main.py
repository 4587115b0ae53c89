"""The program as a whole: what it imports, how it fails, and with which exit status."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait.cli.common import add_model_flags, engine_options
from plait.cli.main import COMMANDS, main
from plait.kernels import native
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("models")))


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)


def modules_after(statement: str) -> set[str]:
    """Names of the modules that are loaded once `statement` has run in a fresh interpreter."""
    code = f"import json, sys\n{statement}\nprint(); print(json.dumps(sorted(sys.modules)))"
    done = python(code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_names_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    loaded = modules_after("from plait.cli.main import main; main(['--help'])")
    assert not loaded & ({f"plait.cli.{name}" for name in COMMANDS} | {"torch", "numpy", "rich"})


def test_importing_plait_imports_nothing_heavy() -> None:
    assert not modules_after("import plait") & {"torch", "numpy", "tokenizers", "transformers", "rich"}


def test_models_imports_no_torch() -> None:
    assert not modules_after("from plait.cli.main import main; main(['models'])") & {"torch", "transformers", "rich"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"plait {plait.__version__}"


def test_python_dash_m_runs_the_same_program() -> None:
    for module in ("plait", "plait.cli.main"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout.strip()) == (0, f"plait {plait.__version__}"), done.stderr


WRONG_REQUESTS = [
    ([], "no command given"),
    (["sing"], "unknown command 'sing'"),
    (["genrate"], "did you mean generate?"),
    (["study"], "study does not exist yet"),
    (["models", "--context", "0"], "must be a whole number of at least 1"),
    (["models", "--memory", "lots"], "'lots' is no amount of memory"),
    (["models", "--subtract-weights"], "needs --memory"),
    (["models", "--strict"], "--strict needs a PATH"),
    (["models", "/nowhere"], "/nowhere"),
    (["bench", "limits", "--rounds", "2"], "--rounds would be ignored"),
    (["bench", "limits", "model.gguf"], "MODEL would be ignored"),
    (["inspect", "/nowhere.gguf"], "/nowhere.gguf"),
    (["inspect", "--plan", "--tensors"], "exclude each other"),
    (["inspect", "--batch", "2"], "--batch would be ignored: it belongs to --plan"),
    (["inspect", "--trace", "x", "--length", "2"], "--length would be ignored: it belongs to --plan"),
    (["inspect", "--training"], "--training would be ignored: it belongs to --plan"),
    (["inspect", "--device", "cpu"], "--device would be ignored: it belongs to --trace"),
    (["inspect", "--dtype", "auto"], "--dtype would be ignored: it belongs to --plan or --trace"),
    (["inspect", "--threads", "1"], "--threads would be ignored: it belongs to --trace"),
    (["inspect", "--plan", "--device", "cpu"], "--device would be ignored: it belongs to --trace"),
    (["inspect", "--plan", "--threads", "1"], "--threads would be ignored: it belongs to --trace"),
    (["inspect", "--tensors", "--strict"], "--strict would be ignored: it belongs to inspect alone or --plan or"),
    (["inspect", "--tensors", "--dtype", "fp32"], "--dtype would be ignored"),
    (["inspect", "--trace", "x", "--adapter", "/nowhere"], "adapter /nowhere does not exist"),
    (["inspect", "--adapter", "y"], "--adapter would be ignored: it belongs to --trace"),
    (["generate", "--promt", "hi"], "did you mean --prompt?"),
    (["verify", "--generation-config", "none"], "plait verify has no flag --generation-config"),
    (["generate"], "--prompt"),
    (["generate", "-p", "x", "--ids", "y"], "not allowed with"),
    (["generate", "-p", "x", "--system", "y"], "--system needs --chat"),
    (["generate", "--ids", "-", "--chat"], "leave --chat out"),
    (["generate", "--prompt-file", "/nowhere.txt"], "/nowhere.txt"),
    (["generate", "/nowhere", "-p", "x"], "/nowhere"),
    (["generate", "-p", "x", "--dtype", "int8"], "--dtype"),
    (["generate", "-p", "x", "--device", "tpu"], "'tpu' is not supported: choose cpu or cuda"),
    (["generate", "-p", "x", "--device", "mps"], "'mps' is not supported: choose cpu or cuda"),
    (["generate", "-p", "x", "--device", "cuda:999"], "there is no device cuda:999"),
    (["generate", "-p", "x", "--threads", "99999999999"], "must be at most 256"),
    (["models", "--memory", "99999999TiB"], "more memory than any machine has"),
    (["models", "--memory", "9" * 400], "more memory than any machine has"),
    (["models", "--context", "9" * 5000], "must be a whole number"),
    (["serve", "--port", "9" * 5000], "must be a port"),
    (["serve", "--host", "a..b"], "cannot listen on a..b"),
    (["serve", "--run-ahead", "soon"], "'soon' must be a number of milliseconds"),
    (["generate", "-p", "x", "--run-ahead", "-1"], "'-1' must be a number of milliseconds"),
    (["generate", "-p", "x", "--temperature", "-1"], "temperature"),
    (["generate", "-p", "x", "--top-p", "2"], "top_p"),
    (["generate", "-p", "x", "-n", "0"], "at least 1"),
    (["generate", "-p", "x", "--beams", "4"], "--beams is not supported yet"),
    (["generate", "-p", "x", "--adapter", "/nowhere"], "adapter /nowhere does not exist"),
    (["generate", "-p", "x", "--adapter", "="], "write NAME=DIRECTORY"),
    (["generate", "-p", "x", "--adapter", "a=x", "--adapter", "b=y"], "give it once"),
    (["chat", "--adapter", "/a/x", "--adapter", "/b/x"], "two adapters would be called x"),
    (["verify", "--adapter", "x"], "plait verify has no flag --adapter"),
    (["serve", "--adapter", "x=/nowhere"], "adapter /nowhere does not exist"),
    (["chat", "--beams", "4"], "--beams is not supported yet"),
    (["score", "default"], "FILE"),
    (["score", "default", "/nowhere.txt"], "/nowhere.txt"),
    (["score", "default", "-", "--kv-memory", "1GiB"], "plait score has no flag --kv-memory"),
    (["score", "default", __file__, "--adapter", "/nowhere"], "adapter /nowhere does not exist"),
    (["score", "default", __file__, "--adapter", "a", "--adapter", "b"], "give it once"),
]


@pytest.mark.parametrize(
    ("argv", "said"), WRONG_REQUESTS, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_a_wrong_request_is_one_line_and_status_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err.splitlines()[-1]
    assert captured.err.splitlines()[-1].startswith("plait: error: ")
    assert "Traceback" not in captured.err


ON_A_MODEL = [
    (["--kv-memory", "lots"], "'lots' is no amount of memory"),
    (["--kv-memory", "99999999TiB"], "more memory than any machine has"),
    (["--kv-memory", "1000000TiB"], "lower --kv-memory"),
    (["--kv-dtype", "q8_0"], "q8_0 is not supported yet"),
    (["--plan", "native", "--kv-dtype", "q8_0"], "q8_0 is not supported yet"),
    (["--max-model-len", "513"], "beyond the model's 512 positions"),
]


@pytest.mark.parametrize(
    ("flags", "said"), ON_A_MODEL, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_a_flag_that_the_model_cannot_follow_is_refused_by_name(
    model: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "native" in flags and native.native_library() is None:
        pytest.skip(f"no native library: {native.reason()}")
    assert main(["generate", model, "-p", "x", "--threads", "1", *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_native_plan_without_its_library_is_refused_with_the_reason(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_NATIVE_LIBRARY", "none")
    assert main(["generate", model, "-p", "x", "--plan", "native"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no native plan" in line and "PLAIT_NATIVE_LIBRARY=none" in line


def test_a_damaged_file_is_a_failure_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    assert main(["inspect", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plait: error: ") and "model.gguf" in line


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(plait.PlaitError):
        main(["inspect", str(path), "--debug"])


def test_an_unexpected_error_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr("plait.cli.models.run", broken)
    assert main(["models"]) == 1
    assert capsys.readouterr().err == "plait: error: ValueError: two lines (--debug shows where)\n"


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m plait models --json | head -c 10", shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[\n  {\n    "
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("models > /dev/full", 1, "plait: error: cannot write the output: No space left on device"),
        ("--help > /dev/full", 1, "plait: error: cannot write the output: No space left on device"),
        ("models >&-", 2, "plait: error: standard output is closed"),
        ("generate --prompt-file - <&-", 2, "plait: error: standard input is closed"),
        ("chat <&-", 2, "plait: error: standard input is closed"),
        ("models --context 7 2>&- > /dev/null", 0, ""),
        ("sing 2>&-", 2, ""),
        ("sing 2> /dev/full", 2, ""),
    ],
)
def test_closed_and_full_streams_are_one_line_with_the_right_status(command: str, status: int, said: str) -> None:
    for unbuffered in ("", "1"):
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        line = f"{sys.executable} -m plait {command}"
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == status
        assert len(done.stderr.splitlines()) == bool(said) and done.stderr.startswith(said)


def test_an_ignored_config_key_is_one_warning_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.tiny import tiny_config

    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config() | {"favourite_colour": "blue"}))
    assert main(["models", str(path)]) == 0
    assert capsys.readouterr().err == "plait: warning: favourite_colour='blue' is no key of llama; ignored\n"
    assert main(["models", str(path), "--strict"]) == 1


def test_run_ahead_is_given_in_milliseconds_and_left_to_the_engine_otherwise() -> None:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    assert engine_options(parser.parse_args(["--run-ahead", "5"]))["run_ahead_s"] == 0.005
    assert engine_options(parser.parse_args(["--run-ahead", "0"]))["run_ahead_s"] == 0
    assert "run_ahead_s" not in engine_options(parser.parse_args([]))
