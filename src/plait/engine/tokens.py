"""A growing array of token ids: prompt and output of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenBuffer:
    """Token ids int32, appended at amortised constant cost, read as an array without copying."""

    def __init__(self, ids: Sequence[int] | NDArray[np.int32], reserve: int = 64) -> None:
        self._ids = np.empty(len(ids) + reserve, np.int32)
        self._ids[: len(ids)] = ids
        self._count = len(ids)

    def __len__(self) -> int:
        return self._count

    @property
    def array(self) -> NDArray[np.int32]:
        """View int32 [length]; valid until the next append."""
        return self._ids[: self._count]

    @property
    def last(self) -> int:
        """The newest id of a buffer that is not empty."""
        return int(self._ids[self._count - 1])

    def append(self, token: int) -> None:
        if self._count == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(64, self._count), np.int32)])
        self._ids[self._count] = token
        self._count += 1

    def copy(self) -> TokenBuffer:
        return TokenBuffer(self.array)
