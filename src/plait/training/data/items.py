"""From rows to items: what a task makes of a row, which rows count, and which side of the split each is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, DataError
from plait.training.data.config import DataConfig, SourceConfig
from plait.training.data.files import Row, find_files, read_table
from plait.training.data.splits import normalised, side_by_name, side_of

# Where `id: auto` looks for the source id.
_ID_COLUMNS = ("source_id", "source", "id")


@dataclass(slots=True)
class Item:
    """One document, pair or chat.

    content: what the task encodes. texts: what must not stand on two sides of the split; source_id likewise, where its
    column says more than a number of the row or the name of a file. side: train, valid or test.
    """

    file: str
    number: int
    content: Any
    texts: tuple[str, ...]
    source_id: str | None = None
    side: str = "train"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Content:
    """What a task finds in a row. leading: the text that stands for the row where it has no source id, and whose words
    are counted; in translation the English side."""

    content: Any
    texts: tuple[str, ...]
    leading: str


def column(row: Row, name: str, kind: type = str) -> Any:
    """A value of a row. Raises DataError, naming the place, where it is missing or of another type."""
    if name not in row.values:
        raise DataError(f"{row.place} has no column {name!r}, only {', '.join(map(repr, row.values)) or 'none'}")
    value = row.values[name]
    if not isinstance(value, kind):
        wanted = "text" if kind is str else "a list"
        raise DataError(f"{row.place}: {name} must be {wanted}, not {type(value).__name__}")
    if isinstance(value, str):
        _check_unicode(value, row, name)
    return value


def _check_unicode(text: str, row: Row, name: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{row.place}: {name} holds a lone surrogate (character {error.start})") from None


def items_of(
    config: DataConfig,
    source: SourceConfig,
    rows: Iterable[Row],
    read: Callable[[Row], Content | None],
    text_columns: Iterable[str],
    tally: Counter[str],
) -> Iterator[Item]:
    """The items of a source, in order, with their sides. `tally` counts rows, those filtered out and blank ones."""
    wanted, joined = _filter(source), _join(source)
    unusable = set(text_columns)
    for row in rows:
        tally["rows"] += 1
        row = joined(row)
        if not wanted(row):
            tally["filtered out"] += 1
            continue
        found = read(row)
        if found is None:
            tally["blank"] += 1
            continue
        if source.min_words or source.max_words:
            words = len(found.leading.split())
            if words < source.min_words or (source.max_words and words > source.max_words):
                tally["filtered out"] += 1
                continue
        name = _id_column(source, row, unusable)
        own = None if name is None else str(row.values[name])
        # A row's number or a file's name says where it stands in this source, and nothing about other sources.
        local = name == "id" or (row.by_file and source.id == "auto" and name == "source_id")
        item = Item(row.file, row.number, found.content, found.texts, None if local else own)
        item.side = _side(config, source, row, own if own is not None else normalised(found.leading))
        yield item
        tally["used"] += 1
        if tally["used"] == source.max_rows:
            return


def _id_column(source: SourceConfig, row: Row, unusable: set[str]) -> str | None:
    if source.id != "auto":
        if source.id not in row.values:
            raise DataError(f"{row.place} has no column {source.id!r}, the source id")
        return source.id
    for name in _ID_COLUMNS:
        if name not in unusable and row.values.get(name) not in (None, ""):
            return name
    return None


def _side(config: DataConfig, source: SourceConfig, row: Row, source_id: str) -> str:
    if source.split != "auto":
        return source.split
    said = row.values.get(source.split_column)
    if said not in (None, ""):
        side = side_by_name(said)
        if side is None:
            raise DataError(
                f"{row.place}: {source.split_column} is {said!r:.60}, not train, valid or test (give the column's name "
                f"as split_column, or an empty one to split by the source id)"
            )
        return side
    return side_of(source_id, config.splits)


def _filter(source: SourceConfig) -> Callable[[Row], bool]:
    where, unless = (_patterns(source, name) for name in ("where", "unless"))
    if not where and not unless:
        return lambda row: True

    def wanted(row: Row) -> bool:
        return all(match(_value(row, name)) for name, match in where.items()) and not any(
            match(_value(row, name)) for name, match in unless.items()
        )

    return wanted


def _value(row: Row, name: str) -> str:
    if name not in row.values:
        raise DataError(f"{row.place} has no column {name!r}, which the source is filtered by")
    value = row.values[name]
    return "" if value is None else str(value)


def _patterns(source: SourceConfig, name: str) -> dict[str, Callable[[str], bool]]:
    conditions: Mapping[str, Any] = getattr(source, name)
    found = {}
    for key, value in conditions.items():
        values = value if isinstance(value, list | tuple) else [value]
        if not values or not all(isinstance(one, str | int | float | bool) for one in values):
            raise ConfigError(f"data.sources: {name}.{key} of {source.name} must be a value or a list of values")
        found[key] = _matcher([str(one) for one in values])
    return found


def _matcher(values: list[str]) -> Callable[[str], bool]:
    exact = frozenset(value for value in values if not set(value) & set("*?["))
    globs = [value for value in values if value not in exact]
    return lambda text: text in exact or any(fnmatchcase(text, pattern) for pattern in globs)


def _join(source: SourceConfig) -> Callable[[Row], Row]:
    if source.join is None:
        return lambda row: row
    on, table = source.join.on, {}
    for path in find_files(source.join.path):
        for row in read_table(Path(path)):
            table[column(row, on)] = {name: value for name, value in row.values.items() if name != on}

    def joined(row: Row) -> Row:
        more = table.get(_value(row, on))
        if more is None:
            raise DataError(f"{row.place}: {on} is {_value(row, on)!r:.60}, which {source.join.path} lacks")  # type: ignore[union-attr]
        return row._replace(values={**more, **row.values})

    return joined
