"""The tools around the benchmarks: pages, the README's table, and what changed between two results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.bench.report import make_row, start_report
from plait.cli.bench import NAMES
from tools import compare_benchmarks, run_benchmarks

EVERY_FLAG = {flag for bench in NAMES.values() for flag in bench.flags}


def a_report(median: float, name: str = "decode") -> dict[str, Any]:
    report = start_report(name, None, {}, {"threads": 2})
    report["model"] = {"name": "toy", "bytes": 1_000_000}
    report["rows"] = [make_row("decode after 128 tokens", "tokens/s", {"plait": [median], "llama-cpp": [100.0]})]
    return report


def test_pages_and_the_readmes_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_benchmarks, "BENCHMARKS", tmp_path / "benchmarks")
    monkeypatch.setattr(run_benchmarks, "MODELS", ("toy-model", "another"))
    for run_name in ("decode", "kv"):
        file = run_benchmarks.result_file("toy-model", run_name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(a_report(230.0, run_name)))
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\nafter\n")
    run_benchmarks.write_pages(readme)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count("| toy | decode after 128 tokens, tokens/s | 230 | 100 | 2.30x |") == 1  # not that of kv
    page = (tmp_path / "benchmarks" / "toy-model.md").read_text()
    assert page.index("## plait bench decode") < page.index("## plait bench kv")
    assert not (tmp_path / "benchmarks" / "another.md").exists()
    run_benchmarks.write_pages(readme)
    assert readme.read_text() == text  # written again, nothing piles up
    # One model measured again, on another commit: the rows of the other stay, and both origins are said.
    file = run_benchmarks.result_file("another", "decode")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({**a_report(300.0), "commit": "abc", "model": {"name": "two", "bytes": 1}}))
    run_benchmarks.write_pages(readme)
    again = readme.read_text()
    assert "| toy | decode after 128 tokens, tokens/s | 230 |" in again and "| two |" in again
    assert "commit abc (decode of two)" in again and "(decode of toy)" in again
    run_benchmarks.write_pages(None)
    assert readme.read_text() == again


def test_every_run_is_a_command_that_exists() -> None:
    from plait.cli.main import parse

    for runs in run_benchmarks.RUNS, *run_benchmarks.QUICK.values():
        assert set(runs) <= set(run_benchmarks.RUNS)
        for words in runs.values():
            args = parse(["bench", *words])
            assert args.name == words[0] and args.model == "MODEL"
            assert all(getattr(args, name) is None or name in NAMES[args.name].flags for name in EVERY_FLAG)
    assert set(run_benchmarks.SHOWN) <= set(run_benchmarks.RUNS)


def test_further_flags_go_where_they_are_taken() -> None:
    extra = ["--rounds", "1", "--threads", "2"]
    assert run_benchmarks.applicable("decode", extra) == extra
    assert run_benchmarks.applicable("accuracy", extra) == ["--threads", "2"]
    for wrong in (["--round", "1"], ["--rounds"], ["rounds", "1"]):
        with pytest.raises(SystemExit):
            run_benchmarks.applicable("decode", wrong)


def test_what_changed_between_two_results() -> None:
    path = "benchmarks/results/toy/decode.json"
    rows = compare_benchmarks.compare({path: a_report(200.0), "gone": a_report(1.0)}, {path: a_report(230.0)})
    change = ("toy/decode", "decode after 128 tokens", "200", "230", "+15.0%", "llama-cpp 2.00x -> 2.30x")
    assert rows == [change]
