"""What a task is: how rows become texts, texts become token sequences, and these become examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plait.errors import DataError
from plait.text.tokenizer import Tokenizer
from plait.training.data.config import DataConfig, SourceConfig
from plait.training.data.examples import Examples, TokenStore
from plait.training.data.files import Row
from plait.training.data.items import Content, Item


class Encoded(NamedTuple):
    """A sequence: token ids, which of them may be learnt (None: all), and the place of its language in the tags."""

    ids: Sequence[int]
    learnt: Sequence[int] | None = None
    language: int | None = None


@dataclass(frozen=True)
class Task:
    """An entry of `build.TASKS`.

    columns: the columns of a source that `id: auto` does not take for ids. read: for a source, what a row holds; None
    where it is blank. texts: what a tokenizer is trained on, and what text is counted in bytes. encode: sequences of
    items, with a
    tally of what was left out. view: the examples of a store. tags: languages that the tokenizer needs tags for.
    fields: those of the configuration, beside sources and splits, that ids depend on.
    """

    columns: Callable[[SourceConfig], tuple[str, ...]]
    read: Callable[[SourceConfig], Callable[[Row], Content | None]]
    texts: Callable[[Item], Iterable[str]]
    encode: Callable[[Sequence[Item], Tokenizer, DataConfig, Counter[str]], Iterator[Encoded]]
    view: Callable[[TokenStore, DataConfig], Examples]
    tags: Callable[[DataConfig], tuple[str, ...]]
    fields: Callable[[DataConfig], dict[str, Any]]


def fit(encoded: Encoded, item: Item, config: DataConfig, tally: Counter[str]) -> Iterator[Encoded]:
    """The sequence as it may be used, or nothing: what has more than `context` positions is dropped or cut, and what
    has no target left is dropped; both are counted. Raises DataError where the configuration asks for it."""
    positions = len(encoded.ids) - 1
    if positions > config.context:
        if config.too_long == "error":
            raise DataError(
                f"{item.place} has {positions} tokens, more than data.context={config.context}: raise it, or set "
                f"data.too_long to drop or truncate"
            )
        if config.too_long == "drop":
            tally["too long"] += 1
            return
        tally["truncated"] += 1
        end = config.context + 1
        encoded = Encoded(encoded.ids[:end], encoded.learnt and encoded.learnt[:end], encoded.language)
    if encoded.learnt is not None and not any(encoded.learnt[1:]):
        tally["without target"] += 1
        return
    yield encoded
