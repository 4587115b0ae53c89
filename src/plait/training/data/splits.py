"""Which side of the split a source is on, and the check that no text is on two."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from plait.errors import DataError
from plait.training.data.config import SplitConfig

if TYPE_CHECKING:
    from plait.training.data.items import Item

SIDES = ("train", "valid", "test")
_NAMES = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev", "development"),
    "test": ("test", "testing"),
}
_BY_NAME = {name: side for side, names in _NAMES.items() for name in names}


def side_by_name(name: object) -> str | None:
    """The side that a split column means; None for an unknown name."""
    return _BY_NAME.get(str(name).strip().lower())


def side_of(source_id: str, splits: SplitConfig) -> str:
    """The side of a source: h = the first 8 bytes of BLAKE2b of its id in UTF-8, as a fraction of 2^64; test below the
    share of test, valid below that and the share of valid, else train. It depends on nothing but id and shares."""
    place = int.from_bytes(blake2b(source_id.encode(), digest_size=8).digest(), "big") / 2**64
    if place < splits.test:
        return "test"
    return "valid" if place < splits.test + splits.valid else "train"


def normalised(text: str) -> str:
    """A text as far as the leak check tells texts apart: NFC, without case, each run of white space one space."""
    folded = unicodedata.normalize("NFC", text).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())


def drop_leaks(items: Sequence[Item], on_leak: str) -> list[Item]:
    """The items whose texts and source ids stand on one side only.

    A text that stands on several is kept on the last of them in the order train, valid, test. on_leak "error": raises
    DataError, naming one, where there is any.
    """
    highest: dict[int, int] = {}
    marks = [_marks(item) for item in items]
    for item, own in zip(items, marks, strict=True):
        rank = SIDES.index(item.side)
        for mark in own:
            highest[mark] = max(rank, highest.get(mark, 0))
    kept = [
        item
        for item, own in zip(items, marks, strict=True)
        if all(highest[mark] == SIDES.index(item.side) for mark in own)
    ]
    if len(kept) < len(items) and on_leak == "error":
        raise DataError(_message(items, marks, highest))
    return kept


def _marks(item: Item) -> list[int]:
    """A number for each text and for the source id."""
    names = ["text " + normalised(text) for text in item.texts]
    if item.source_id is not None:
        names.append("id " + item.source_id)
    return [int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") for name in names]


def _message(items: Sequence[Item], marks: Iterable[Sequence[int]], highest: dict[int, int]) -> str:
    pairs = list(zip(items, marks, strict=True))
    leaks = [
        (item, own.index(mark), mark) for item, own in pairs for mark in own if highest[mark] != SIDES.index(item.side)
    ]
    item, which, mark = leaks[0]
    other = next(o for o, own in pairs if mark in own and SIDES.index(o.side) == highest[mark])
    what = f"the text {item.texts[which][:80]!r}" if which < len(item.texts) else f"the source {item.source_id!r:.80}"
    return (
        f"{what} stands in {item.side} ({item.place}) and in {other.side} ({other.place}), and {len(leaks) - 1} more "
        f"such: name the column that tells what they come from as the source's id, or set data.splits.on_leak=drop"
    )
