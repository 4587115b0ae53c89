"""Token ids in one flat array, and the three ways of making training examples of them.

A `TokenStore` holds sequences: documents, `<lang> source <sep> target <eos>`, rendered chats. An example of n positions
is made of n + 1 tokens: the first n are its input, each the next one's target where that one may be learnt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.training.data.constants import IGNORE, ROLE_SOURCE, ROLE_TARGET

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Example:
    """One row of a batch, unpadded: see `Batch` for the fields, [n] each."""

    ids: Int64
    targets: Int64
    segment_ids: Int64 | None = None
    positions: Int64 | None = None
    roles: NDArray[np.int8] | None = None
    language: int | None = None


@dataclass(frozen=True)
class TokenStore:
    """Sequences of token ids of one source and split.

    tokens: uint16 or uint32 [N]. offsets: int64 [S + 1], where each sequence begins.
    learnt: uint8 [N], 1 for the tokens that may be targets, or None: all. languages: int64 [S] or None.
    """

    tokens: NDArray[Any]
    offsets: Int64
    learnt: NDArray[np.uint8] | None = None
    languages: Int64 | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        return np.diff(self.offsets)

    def sequence(self, index: int) -> tuple[Int64, NDArray[np.uint8] | None]:
        """Token ids and `learnt` of a sequence."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        learnt = None if self.learnt is None else self.learnt[start:end]
        return self.tokens[start:end].astype(np.int64), learnt


class Examples(Protocol):
    """Examples by index. lengths: int64 [n], positions of each."""

    @property
    def lengths(self) -> Int64: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


class Windows:
    """Window i of a stream of documents: input tokens i*L .. i*L + L - 1, targets one further. The last may be shorter.

    apart: documents of a window are segments with positions of their own, and a document's last token predicts nothing.
    """

    def __init__(self, store: TokenStore, window: int, apart: bool = False) -> None:
        self._store, self._window, self._apart = store, window, apart
        positions = max(len(store.tokens) - 1, 0)
        self._count = -(-positions // window)
        self.lengths = np.full(self._count, window, np.int64)
        if self._count:
            self.lengths[-1] = positions - (self._count - 1) * window

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        start = index * self._window
        tokens = self._store.tokens[start : start + self._window + 1].astype(np.int64)
        ids, targets = tokens[:-1], tokens[1:].copy()
        if not self._apart:
            return Example(ids, targets)
        place = np.arange(start, start + len(tokens))
        document = np.searchsorted(self._store.offsets, place, side="right") - 1
        targets[document[1:] != document[:-1]] = IGNORE
        document, place = document[:-1], place[:-1]
        begin = np.maximum(self._store.offsets[document], start)
        return Example(ids, targets, segment_ids=document - document[0], positions=place - begin)


class Sequences:
    """Each sequence of a store is an example.

    roles: whether examples tell their two sides: the source's ends before the first token that is learnt.
    """

    def __init__(self, store: TokenStore, roles: bool = False) -> None:
        self._store, self._roles = store, roles
        self.lengths = store.lengths - 1

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> Example:
        tokens, learnt = self._store.sequence(index)
        ids, targets = tokens[:-1], tokens[1:].copy()
        roles = None
        if learnt is not None:
            targets[learnt[1:] == 0] = IGNORE
            if self._roles:
                roles = np.where(np.arange(len(ids)) < int(learnt.argmax()), ROLE_SOURCE, ROLE_TARGET).astype(np.int8)
        languages = self._store.languages
        return Example(ids, targets, roles=roles, language=None if languages is None else int(languages[index]))


class Packed:
    """Rows of at most `size` positions, each of several examples that do not see each other.

    Which examples share a row follows from their lengths alone: the longest first, each into the fullest row that
    has room (best fit, decreasing).
    """

    def __init__(self, examples: Sequences, size: int) -> None:
        self._examples = examples
        self._rows = _best_fit(examples.lengths, size)
        self.lengths = np.array([examples.lengths[row].sum() for row in self._rows], np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        parts = [self._examples[member] for member in self._rows[index]]
        counts = [len(part.ids) for part in parts]
        return Example(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.targets for part in parts]),
            segment_ids=np.repeat(np.arange(len(parts)), counts),
            positions=np.concatenate([np.arange(count) for count in counts]),
        )


def _best_fit(lengths: Int64, size: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}  # rows by what they have room for
    rooms: list[int] = []  # its keys, in order
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            rows.append([])
            row, free = len(rows) - 1, size
        else:
            free = rooms[place]
            row = room[free].pop()
            if not room[free]:
                del room[free], rooms[place]
        rows[row].append(index)
        left = free - length
        if left not in room:
            room[left] = []
            insort(rooms, left)
        room[left].append(row)
    return [sorted(row) for row in rows]


class Joined:
    """Examples of several sources, one after the other.

    starts: int64 [K + 1], where each source's examples begin. weights: how often each source is seen in an epoch.
    """

    def __init__(self, parts: Sequence[Examples], weights: Sequence[float]) -> None:
        self._parts = list(parts)
        self.weights = tuple(weights)
        self.starts = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        self.lengths: Int64 = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no example {index} among {len(self)}")
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self._parts[part][index - int(self.starts[part])]
