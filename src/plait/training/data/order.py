"""Which examples stand in which batch: a pure function of (seed, epoch).

Random order comes from hashing numbers, not from a generator with a state: key i of an epoch depends on seed, epoch and
i alone, on every machine and with every version of numpy, and nothing needs to be drawn before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

# A chunk, inside which examples are sorted by length, holds about so many batches.
CHUNK_BATCHES = 64
_ORDER, _BATCHES, _SHARE = 1, 2, 3  # what is shuffled


@dataclass(frozen=True)
class Plan:
    """The batches of an epoch: batch b has the examples members[starts[b] .. starts[b + 1] - 1].

    members: int64 [n]; starts: int64 [batches + 1]. positions: of all batches, padding included; tokens: without it.
    """

    members: Int64
    starts: Int64
    positions: int
    tokens: int

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.positions if self.positions else 0.0


def _mix(x: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), uint64 in and out, modulo 2^64."""
    x = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(count: int, *names: int) -> NDArray[np.uint64]:
    """uint64 [count]: key i is a hash of `names` and i."""
    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for name in names:
            state = _mix(state ^ _mix(np.array([name & (2**64 - 1)], np.uint64)))
        return _mix(_mix(np.arange(count, dtype=np.uint64)) ^ state)


def permutation(count: int, *names: int) -> Int64:
    """int64 [count]: the numbers below `count` in an order that follows from `names`."""
    return np.argsort(keys(count, *names), kind="stable").astype(np.int64)


def members_of_epoch(starts: Int64, weights: Sequence[float], seed: int, epoch: int) -> Int64:
    """The examples of an epoch, in no order: weight w takes each example of its source floor(w) times, and the share
    that is left of w in turns, so that over the epochs every example is taken equally often."""
    parts = []
    for k, weight in enumerate(weights):
        first, count = int(starts[k]), int(starts[k + 1] - starts[k])
        whole = np.arange(first, first + count, dtype=np.int64)
        parts += [whole] * int(weight)
        share = weight - int(weight)
        if share and count:
            begin, end = (int(np.floor(e * share * count + 1e-9)) for e in (epoch, epoch + 1))
            turn = permutation(count, seed, _SHARE, k)
            parts.append(first + turn[np.arange(begin, end) % count])
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def plan_epoch(lengths: Int64, members: Int64, budget_tokens: int, seed: int, epoch: int, shuffle: bool = True) -> Plan:
    """Batches whose longest example times count is at most `budget_tokens`, unless an example alone is longer.

    Shuffled, cut into chunks, each sorted by length and cut into batches; then the batches are shuffled. Without
    `shuffle`: sorted by length as a whole, the shortest first.
    """
    if shuffle:
        members = members[permutation(len(members), seed, epoch, _ORDER)]
        total = int(lengths[members].sum())
        chunks = max(1, round(total / (CHUNK_BATCHES * budget_tokens)))
    else:
        chunks = 1
    pieces, positions = [], 0
    for chunk in np.array_split(members, chunks):
        ordered = chunk[np.argsort(lengths[chunk], kind="stable")]
        sizes = lengths[ordered].tolist()
        start = 0
        while start < len(sizes):
            stop = _fill(sizes, start, budget_tokens)
            positions += (stop - start) * sizes[stop - 1]
            pieces.append(ordered[start:stop])
            start = stop
    if shuffle:
        pieces = [pieces[b] for b in permutation(len(pieces), seed, epoch, _BATCHES).tolist()]
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    joined = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    return Plan(joined, starts, positions, int(lengths[members].sum()))


def _fill(sizes: list[int], start: int, budget: int) -> int:
    """The last stop with sizes[stop - 1] * (stop - start) <= budget, at least start + 1; sizes ascend."""
    low, high = start + 1, min(len(sizes), start + max(1, budget // max(sizes[start], 1)))
    while low < high:
        middle = (low + high + 1) // 2
        if sizes[middle - 1] * (middle - start) <= budget:
            low = middle
        else:
            high = middle - 1
    return low
