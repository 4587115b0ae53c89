"""Rows of a data set that the `datasets` library knows by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plait.errors import DataError
from plait.training.data.config import SourceConfig
from plait.training.data.files import Row


def load(source: SourceConfig) -> Any:
    """The splits of a data set by name, downloaded or from the library's own cache. Raises DataError."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"data.sources: the data set {source.dataset} needs the datasets library: pip install datasets, "
            f"or give a path"
        ) from None
    try:
        return datasets.load_dataset(source.dataset, source.subset or None)
    except Exception as error:  # the library's own errors are many: no network, no such name, a script, a split
        raise DataError(f"data.sources: the data set {source.dataset} cannot be loaded: {error}") from None


def rows(source: SourceConfig, splits: Any) -> Iterator[Row]:
    """All rows, each with the name of its split in `split_column`, unless there is but one."""
    for split, table in splits.items():
        said = {source.split_column: split} if len(splits) > 1 and source.split_column else {}
        for number, values in enumerate(table, 1):
            yield Row(f"{source.dataset} ({split})", number, {**said, **values})


def fingerprint(splits: Any) -> list[list[str]]:
    """What tells this version of the data set from others."""
    return [[str(split), str(table._fingerprint)] for split, table in splits.items()]
