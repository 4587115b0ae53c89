"""Rows, ratios, and the tables that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.bench.report import make_row, markdown_lines, number, page, start_report, summary_table, text_lines, times


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "toy.gguf"
    file.write_bytes(b"x" * 2_000_000)
    made = start_report("decode", file, {"peer": "1.2"}, {"threads": 2, "text": None})
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
    for said in ("toy (2 MB)", report["machine"]["cpu"], "peer 1.2", "2.00x", "1.60x", "80%", "18 GB/s", "60 of 64"):
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


def test_a_page_describes_the_machine_once_and_has_a_section_per_report(report: dict[str, Any]) -> None:
    text = page("Toy", [report, {**report, "bench": "prefill"}], "make bench")
    assert text.count(report["machine"]["cpu"]) == 1
    assert text.startswith("# Toy\n") and report["date"] in text
    assert "## plait bench decode, toy" in text and "## plait bench prefill, toy" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12,346"), (123.456, "123"), (12.345, "12.3"), (1.2345, "1.23"), (0.0012345, "0.00123")],
)
def test_numbers_of_a_table(value: float, text: str) -> None:
    assert number(value) == text


def test_times() -> None:
    assert (times(2.344), times(123.4)) == ("2.34x", "123x")
