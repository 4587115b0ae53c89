"""`plait chat`, driven through pipes: turns, commands, and an interrupt in the middle of an answer."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("models")))


class Session:
    """Runs one chat over the given lines."""

    def __init__(self, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._model, self._monkeypatch, self._capsys = model, monkeypatch, capsys

    def __call__(self, *lines: str, flags: tuple[str, ...] = ()) -> tuple[list[str], str]:
        """(the answers on stdout, stderr)."""
        self._monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        common = ["--temperature", "0", "-n", "6", "--threads", "1", "--dtype", "fp32"]
        assert main(["chat", self._model, *common, *flags]) == 0
        captured = self._capsys.readouterr()
        return captured.out.split("\n"), captured.err


@pytest.fixture
def chat(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Session:
    return Session(model, monkeypatch, capsys)


def saved(path: Path) -> list[tuple[str, bool]]:
    return [(turn["role"], turn["interrupted"]) for turn in json.loads(path.read_text())["turns"]]


def test_an_answer_depends_on_the_turns_before_it(chat: Session, tmp_path: Path) -> None:
    chat("one", f"/save {tmp_path / 'a'}", "/reset", "one", f"/save {tmp_path / 'b'}", "two", f"/save {tmp_path / 'c'}")
    a, b, c = (json.loads((tmp_path / name).read_text())["turns"] for name in "abc")
    assert a == b == c[:2] and [turn["role"] for turn in c] == ["user", "assistant", "user", "assistant"]
    chat("two", f"/save {tmp_path / 'd'}")
    assert json.loads((tmp_path / "d").read_text())["turns"][1] != c[3]


def test_a_saved_conversation_goes_on_as_if_it_had_never_stopped(chat: Session, tmp_path: Path) -> None:
    whole, half, rest = (tmp_path / name for name in ("whole", "half", "rest"))
    chat("/system Be brief.", "one", f"/save {half}", "two", f"/save {whole}")
    chat("two", f"/save {rest}", flags=("--load", str(half)))
    assert json.loads(rest.read_text()) == json.loads(whole.read_text())
    chat(f"/load {half}", "two", f"/save {rest}")
    assert json.loads(rest.read_text()) == json.loads(whole.read_text())


def test_commands_say_what_they_did(chat: Session) -> None:
    _, said = chat("/system", "/system Be brief.", "/help", "/nonsense", "/save", "/load /nowhere", "/exit", "unread")
    assert "system message: none\nsystem message: Be brief.\n" in said
    assert all(name in said for name in ("/reset", "/system", "/save", "/load", "/help", "/exit"))
    assert "unknown command /nonsense" in said and "name a file" in said and "/nowhere: No such file" in said


def test_exit_and_the_end_of_the_input_end_it(chat: Session) -> None:
    assert chat("/exit", "one")[0] == [""]
    assert chat()[0] == [""]
    assert len(chat("one", "", "   ")[0]) >= 2


def test_a_full_context_is_an_error_line_and_the_conversation_stays(chat: Session, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    _, said = chat("one", "x" * 600, f"/save {path}", "two")
    assert "plait: error: " in said
    assert [role for role, _ in saved(path)] == ["user", "assistant"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "plait-conversation", "turns": [{}]}', '{"format": 1}'])
def test_a_file_that_is_no_conversation_changes_nothing(chat: Session, tmp_path: Path, text: str) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.write_text(text)
    _, said = chat("one", f"/load {bad}", f"/save {good}")
    assert f"{bad}" in said and len(saved(good)) == 2


@pytest.mark.slow
def test_an_interrupt_keeps_the_conversation_and_the_partial_answer(model: str, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    command = [sys.executable, "-m", "plait", "chat", model, "-n", "200", "--threads", "1", "--temperature", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(f"two\n/save {path}\n".encode(), timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0
    assert b" [interrupted]\n" in out
    assert saved(path) == [("user", False), ("assistant", True), ("user", False), ("assistant", False)]
