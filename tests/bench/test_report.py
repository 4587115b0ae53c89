"""Rows, ratios, and the tables that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.bench.limits import source_commit
from plait.bench.report import (
    make_row,
    markdown_lines,
    number,
    origins,
    page,
    start_report,
    summary_table,
    text_lines,
    times,
)

ENGINES = {
    "plait": {"plan": "native", "isa": "avx2", "weights": "4 Q4_1", "kv_dtype": "bf16"},
    "llama-cpp": {"kv_dtype": "fp16"},
}
ENGINE_LINES = ("plait: native plan (avx2), weights 4 Q4_1, keys and values bf16", "llama-cpp: keys and values fp16")


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "toy.gguf"
    file.write_bytes(b"x" * 2_000_000)
    made = start_report("decode", file, {"peer": "1.2"}, {"threads": 2, "text": None}, ENGINES)
    made["rows"] = [
        make_row(
            "decode after 128 tokens",
            "tokens/s",
            {"plait": [190.0, 200.0, 230.0], "llama-cpp": [99.0, 100.0, 101.0], "llama-cpp Q4_0": [125.0]},
            limit=("reading at 18 GB/s", 250.0),
            details={"leading tokens equal to ours": {"llama-cpp": "60 of 64"}},
        )
    ]
    made["notes"] = ["a note"]
    return made


def test_ratios_are_of_medians(report: dict[str, Any]) -> None:
    assert report["rows"][0]["ratios"] == {"llama-cpp": 2.0, "llama-cpp Q4_0": 1.6}


def test_a_side_that_measured_nothing_gives_no_ratio() -> None:
    assert make_row("x", "nats", {"plait": [1.0], "other": [0.0]})["ratios"] == {}
    assert make_row("x", "nats", {"other": [2.0]})["ratios"] == {}


def test_the_text_names_machine_versions_ratios_and_the_share_of_the_limit(report: dict[str, Any]) -> None:
    text = "\n".join(text_lines(report))
    for said in (
        "toy (2 MB)",
        report["machine"]["cpu"],
        "peer 1.2",
        "2.00x",
        "1.60x",
        "80%",
        "18 GB/s",
        "60 of 64",
        *ENGINE_LINES,
    ):
        assert said in text, said
    assert text.endswith("a note")


def test_every_table_row_of_markdown_has_as_many_cells_as_its_header(report: dict[str, Any]) -> None:
    for lines in (markdown_lines(report), summary_table([report])):
        table = [line for line in lines if line.startswith("|")]
        assert len(table) >= 3
        assert len({line.count("|") for line in table}) == 1


def test_the_summary_table_has_the_peer_on_the_same_file_and_the_other_ratios(report: dict[str, Any]) -> None:
    (row,) = summary_table([report])[2:]
    assert row == "| toy | decode after 128 tokens, tokens/s | 200 | 100 | 2.00x | 1.60x Q4_0 |"
    report["rows"][0]["sides"].pop("llama-cpp")
    assert summary_table([report])[2:] == []


def test_every_section_of_a_page_has_its_own_origin(report: dict[str, Any]) -> None:
    other = {**report, "bench": "prefill", "date": "2020-01-02", "commit": "abc", "versions": {"peer": "9.9"}}
    text = page("Toy", [{**report, "commit": "def"}, other], "make bench")
    assert text.startswith("# Toy\n")
    decode, prefill = text.split("## plait bench ")[1:]
    assert decode.startswith("decode, toy") and prefill.startswith("prefill, toy")
    for said in (report["date"], "commit def", "peer 1.2", report["machine"]["cpu"], *ENGINE_LINES):
        assert said in decode, said
    for said in ("2020-01-02, commit abc: ", "peer 9.9", report["machine"]["cpu"], *ENGINE_LINES):
        assert said in prefill, said
    assert "def" not in prefill.split("\n\n")[1] and "abc" not in decode


def test_origins_are_said_once_each(report: dict[str, Any]) -> None:
    (line,) = origins([report, report])
    assert report["date"] in line and "(" not in line.removeprefix(report["machine"]["cpu"])[-20:]
    lines = origins([report, {**report, "bench": "memory", "commit": "abc"}])
    assert lines[0].endswith("(decode of toy)") and lines[1].endswith("commit abc (memory of toy)")


def test_the_commit_is_that_of_a_checkout(tmp_path: Path) -> None:
    assert source_commit(tmp_path) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12,346"), (123.456, "123"), (12.345, "12.3"), (1.2345, "1.23"), (0.0012345, "0.00123")],
)
def test_numbers_of_a_table(value: float, text: str) -> None:
    assert number(value) == text


def test_times() -> None:
    assert (times(2.344), times(123.4)) == ("2.34x", "123x")
