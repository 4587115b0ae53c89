"""Rows out of files: a table of formats, a table of compressions, and one clear line for whatever is wrong in them."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from plait.errors import DataError, UsageError
from plait.training.data.config import SourceConfig

_BOM = b"\xef\xbb\xbf"
# A section of a plain text ends with the paragraph, or else with the line, that brings it to so many characters.
SECTION_CHARS, SECTION_MAX_CHARS = 2_000, 10_000
_MAX_FIELD_CHARS = 1 << 30


class Row(NamedTuple):
    """values: by column. file, number: where it stands; of text and JSON the line, counted from 1, else the row.
    by_file: its source_id is a file's name, which another source may use for another file."""

    file: str
    number: int
    values: dict[str, Any]
    by_file: bool = False

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


def _open_zst(path: Path) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path} needs the zstandard package: pip install zstandard, or unpack the file") from None
    file: BinaryIO = zstandard.open(path, "rb")
    return file


_COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _open_zst,
}
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv", ".csv": "csv", ".parquet": "parquet"}


def find_files(path: str) -> list[Path]:
    """The files that a path, a directory (its .txt files, in all folders) or a pattern means, in order of name."""
    place = Path(path).expanduser()
    if place.is_dir():
        found = sorted(file for file in place.rglob("*") if file.is_file() and _inner(file).suffix == ".txt")
        if not found:
            raise UsageError(f"{place} has no .txt files; name the files that are meant, or a pattern such as *.jsonl")
        return found
    if place.is_file():
        return [place]
    if any(sign in place.name for sign in "*?["):
        found = sorted(file for file in place.parent.glob(place.name) if file.is_file())
        if found:
            return found
    raise UsageError(f"data.sources: there is no file {place}")


def format_of(source: SourceConfig, path: Path) -> str:
    """The format of a file of a source, by its name where the source does not say."""
    if source.target_path:
        return "lines"
    return source.format if source.format != "auto" else _BY_SUFFIX.get(_inner(path).suffix.lower(), "text")


def read_rows(source: SourceConfig) -> Iterator[Row]:
    """All rows of a source that has a path. Raises DataError, naming file and line."""
    files = find_files(source.path)
    base = Path(source.path).expanduser()
    base = base if base.is_dir() else base.parent
    for path in files:
        kind = format_of(source, path)
        if kind == "lines":
            yield from _read_pairs(source, path)
        elif kind == "text":
            several = files != [Path(source.path).expanduser()]
            yield from _read_text(source, path, path.relative_to(base).as_posix(), several)
        else:
            yield from READERS[kind](path)


def read_table(path: Path) -> Iterator[Row]:
    """The rows of a table with a header: .csv, else tab-separated."""
    return READERS["csv" if _inner(path).suffix.lower() == ".csv" else "tsv"](path)


def _inner(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with _COMPRESSIONS.get(path.suffix.lower(), lambda p: p.open("rb"))(path) as file:
            yield file
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or cut off: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without their ends. Only a newline ends a line (and a return before it goes with it):
    what else Unicode calls a line end may stand inside a text."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(_BOM)
            yield number, _text(line.removesuffix(b"\n").removesuffix(b"\r"), path, number)


def _text(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{line} is not UTF-8 (byte {error.start} of the line): convert the file") from None


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise DataError(f"{path}:{number} must be a JSON object, not {type(values).__name__}")
        yield Row(str(path), number, values)


def _read_tsv(path: Path) -> Iterator[Row]:
    header: list[str] = []
    for number, line in _lines(path):
        fields = line.split("\t")
        if number == 1:
            header = _header(fields, path)
        elif line:
            yield Row(str(path), number, _named(header, fields, path, number))


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_MAX_FIELD_CHARS)
    reader = csv.reader(line + "\n" for _, line in _lines(path))
    try:
        header = _header(next(reader, []), path)
        for fields in reader:
            if fields:
                yield Row(str(path), reader.line_num, _named(header, fields, path, reader.line_num))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num} is not CSV: {error}") from None


def _header(fields: list[str], path: Path) -> list[str]:
    doubled = [name for name in fields if fields.count(name) > 1]
    if doubled or not any(fields):
        raise DataError(
            f"{path}:1 must name the columns" + (f", each once (twice there: {doubled[0]!r})" if doubled else "")
        )
    return fields


def _named(header: list[str], fields: list[str], path: Path, number: int) -> dict[str, str]:
    if len(fields) != len(header):
        raise DataError(f"{path}:{number} has {len(fields)} fields, the header has {len(header)}")
    return dict(zip(header, fields, strict=True))


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path} needs the pyarrow package: pip install pyarrow") from None
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(str(path), number, values)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "jsonl": _read_jsonl,
    "tsv": _read_tsv,
    "csv": _read_csv,
    "parquet": _read_parquet,
}


def _read_pairs(source: SourceConfig, path: Path) -> Iterator[Row]:
    """Two files, line by line; a blank line stays one, so that what follows it keeps its partner."""
    other = Path(source.target_path).expanduser()
    if not other.is_file():
        raise UsageError(f"data.sources: there is no file {other}")
    left, right = _lines(path), _lines(other)
    number = 0
    while True:
        one, two = next(left, None), next(right, None)
        if one is None and two is None:
            return
        if one is None or two is None:
            counts = [number + sum(1 for _ in rest) + (line is not None) for line, rest in ((one, left), (two, right))]
            raise DataError(
                f"{path} has {counts[0]} lines, {other} has {counts[1]}: line n of one belongs to line n of the other"
            )
        number += 1
        yield Row(str(path), number, {source.source: one[1], source.target: two[1]})


def _read_text(source: SourceConfig, path: Path, name: str, several: bool) -> Iterator[Row]:
    per = source.per if source.per != "auto" else ("file" if several else "section")
    if per == "line":
        for number, line in _lines(path):
            yield Row(str(path), number, {source.text: line})
    elif per == "file":
        # The name, without the folder's own place, so that the split does not depend on where the files lie.
        text = "\n".join(line for _, line in _lines(path))
        yield Row(str(path), 1, {source.text: text, "source_id": name}, by_file=True)
    else:
        for number, text in _sections(path):
            yield Row(str(path), number, {source.text: text})


def _sections(path: Path) -> Iterator[tuple[int, str]]:
    """Runs of paragraphs, each with the number of its first line."""
    lines: list[str] = []
    chars, first = 0, 1
    for number, line in _lines(path):
        if not lines:
            first = number
        lines.append(line)
        chars += len(line) + 1
        if chars >= SECTION_MAX_CHARS or (chars >= SECTION_CHARS and not line.strip()):
            yield first, "\n".join(lines)
            lines, chars = [], 0
    if lines:
        yield first, "\n".join(lines)
