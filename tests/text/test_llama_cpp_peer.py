"""llama.cpp, run now, gives the ids that the fixtures hold: those of the tests that need no other engine."""

from __future__ import annotations

import json
import lzma
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.real_models import gemma3_path, smollm2_path
from tools.peers import peer_python, peer_version

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
REAL = {"smollm2": smollm2_path, "gemma3": gemma3_path}


def unpacked(path: Path) -> Any:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


@pytest.mark.peer
@pytest.mark.real_model
@pytest.mark.parametrize("model", REAL)
def test_the_fixtures_are_what_llama_cpp_gives(model: str, tmp_path: Path) -> None:
    if peer_version("llama-cpp") is None:
        pytest.skip("llama-cpp is not installed: python tools/peers.py install llama-cpp")
    script, lines = ROOT / "tools" / "make_tokenizer_fixture.py", FIXTURES / "tokenizer_lines.json.xz"
    output = tmp_path / "ids.json.xz"
    command = [peer_python("llama-cpp"), script, REAL[model](), lines, output]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, kept = unpacked(output), unpacked(FIXTURES / f"tokenizer_ids_{model}.json.xz")
    assert len(found["parsed"]) == len(unpacked(lines))
    assert found == kept
