"""Rows out of files: every format, and one clear line for what is wrong in them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.errors import DataError, PlaitError, UsageError
from plait.training.data import datasets_hub
from plait.training.data.config import JoinConfig, SourceConfig
from plait.training.data.files import SECTION_CHARS, SECTION_MAX_CHARS, read_rows


def rows(path: Path, **more: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(row.number, row.values) for row in read_rows(SourceConfig(path=str(path), **more))]


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".xz", lzma.open), (".bz2", bz2.open)])
def test_jsonl_compressed_or_not(tmp_path: Path, suffix: str, opener: Any) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    with opener(path, "wb") as file:
        file.write('\ufeff{"text": "một"}\r\n\n{"text": "a\\u2028b\u2028c"}'.encode())
    assert rows(path) == [(1, {"text": "một"}), (3, {"text": "a\u2028b\u2028c"})]


def test_tables(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b'en\tvi\r\n"quoted\tc\xc3\xb3\r\n\tx\n')
    assert rows(tmp_path / "a.tsv") == [(2, {"en": '"quoted', "vi": "có"}), (3, {"en": "", "vi": "x"})]
    (tmp_path / "a.csv").write_text('en,vi\n"two\nlines, quoted",x\n')
    assert rows(tmp_path / "a.csv") == [(3, {"en": "two\nlines, quoted", "vi": "x"})]


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["a", "b"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [(1, {"text": "a", "n": 1}), (2, {"text": "b", "n": 2})]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as parquet"):
        rows(tmp_path / "b.parquet")


@pytest.mark.parametrize("package", ["pyarrow", "zstandard", "datasets"])
def test_a_missing_package_is_named(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.jsonl.zst").touch()
    with pytest.raises(DataError, match=f"pip install {package}"):
        if package == "datasets":
            datasets_hub.load(SourceConfig(dataset="owner/name"))
        rows(tmp_path / ("a.parquet" if package == "pyarrow" else "a.jsonl.zst"))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_parallel_files_keep_their_pairs(tmp_path: Path, end: str, last: bool) -> None:
    # A blank line on one side stays where it is; tags in the text tell whether pairs still belong together.
    left, right = ["1 a", "", "3 c\u0085d", "4 e"], ["1 x", "2 y", "3 z", ""]
    (tmp_path / "a.en").write_bytes(("\ufeff" + end.join(left) + (end if last else "")).encode())
    (tmp_path / "a.vi").write_bytes((end.join(right) + end).encode())
    found = rows(tmp_path / "a.en", target_path=str(tmp_path / "a.vi"), source="en", target="vi")
    assert [(row["en"], row["vi"]) for _, row in found] == list(zip(left, right, strict=True))


def test_parallel_files_of_unequal_length(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("a\nb\nc\n")
    (tmp_path / "a.vi").write_text("x\n")
    with pytest.raises(DataError, match=r"a\.en has 3 lines, .*a\.vi has 1"):
        rows(tmp_path / "a.en", target_path=str(tmp_path / "a.vi"))


def test_a_directory_of_texts(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_bytes(b"one\r\ntwo")
    (tmp_path / "inner" / "a.txt").write_text("three\n")
    (tmp_path / "other.md").write_text("no")
    found = [values for _, values in rows(tmp_path)]
    assert found == [
        {"text": "one\ntwo", "source_id": "b.txt"},
        {"text": "three", "source_id": "inner/a.txt"},
    ]
    assert [values["text"] for _, values in rows(tmp_path, per="line")] == ["one", "two", "three"]
    assert [values["source_id"] for _, values in rows(tmp_path / "*.txt")] == ["b.txt"]


def test_a_single_text_is_cut_into_sections(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {number} " + "word " * 60 for number in range(40)]  # 313 characters or so each
    long = "x" * (SECTION_MAX_CHARS - 1)
    (tmp_path / "book.txt").write_text("\n\n".join([*paragraphs, long]))
    found = rows(tmp_path / "book.txt")
    assert "\n".join(values["text"] for _, values in found) == (tmp_path / "book.txt").read_text()
    sizes = [len(values["text"]) for _, values in found]
    assert all(SECTION_CHARS <= size + 1 <= SECTION_CHARS + 320 for size in sizes[:-1])
    assert found[0][0] == 1 and found[1][1]["text"].startswith("paragraph ")


BAD = {
    "json": (b'{"text": "a"}\n{"text": \n', "a.jsonl:2 is not JSON"),
    "list": (b'["a"]\n', "a.jsonl:1 must be a JSON object, not list"),
    "deep": (b"[" * 100_000 + b"\n", "a.jsonl:1 is not JSON"),
    "utf8": (b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl:2 is not UTF-8 \(byte 10 of the line\)"),
    "fields": (b"en\tvi\na\tb\na\n", "a.tsv:3 has 1 fields, the header has 2"),
    "header": (b"en\ten\na\tb\n", r"a.tsv:1 must name the columns, each once \(twice there: 'en'\)"),
    "no header": (b"\na\tb\n", "a.tsv:1 must name the columns"),
    "gzip": (gzip.compress(b'{"text": "a"}\n' * 100)[:-20], "a.jsonl.gz is damaged or cut off"),
    "not gzip": (b"plain", "a.jsonl.gz is damaged or cut off"),
    "xz": (lzma.compress(b'{"text": "a"}\n' * 100)[:-20], "a.jsonl.xz is damaged or cut off"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_one_line_with_its_place(tmp_path: Path, name: str) -> None:
    data, message = BAD[name]
    path = tmp_path / next(f"a{s}" for s in (".jsonl.gz", ".jsonl.xz", ".jsonl", ".tsv") if f"a{s}" in message)
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as error:
        rows(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["missing.jsonl", "*.jsonl", ""])
def test_files_that_are_not_there(tmp_path: Path, path: str) -> None:
    with pytest.raises(UsageError, match=r"there is no file|has no \.txt files"):
        rows(tmp_path / path)


@pytest.mark.parametrize(
    "more",
    [
        {"path": ""},
        {"dataset": "owner/name"},
        {"weight": 0.0},
        {"weight": float("nan")},
        {"languages": ("en",)},
        {"format": "lines"},
        {"format": "tsv", "target_path": "b"},
        {"max_rows": -1},
    ],
)
def test_sources_that_make_no_sense(more: dict[str, Any]) -> None:
    with pytest.raises(PlaitError, match=r"data\.sources: "):
        SourceConfig(**{"path": "a", **more})


def test_rows_of_a_data_set_by_name() -> None:
    # What the library's DatasetDict is to us: tables by split.
    splits = {"train": [{"text": "a"}], "validation": [{"text": "b"}]}
    source = SourceConfig(dataset="owner/name")
    assert [row.values for row in datasets_hub.rows(source, splits)] == [
        {"split": "train", "text": "a"},
        {"split": "validation", "text": "b"},
    ]
    assert [row.values for row in datasets_hub.rows(source, {"train": [{"text": "a"}]})] == [{"text": "a"}]


def test_a_join_says_which_table_and_which_column() -> None:
    with pytest.raises(PlaitError, match="join"):
        SourceConfig(path="a", join=JoinConfig("b", ""))
