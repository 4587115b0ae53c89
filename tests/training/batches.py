"""Small batches for the tests of training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.training.batch import Batch


def batch_of(rows: Sequence[Sequence[int]], vocabulary: int, holes: Sequence[int] = ()) -> Batch:
    """Rows of ids, each predicting the next; the last predicts nothing. holes: flat positions without a target."""
    length = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full_like(ids, -100)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        values = torch.tensor(row)
        ids[i, : len(row)], mask[i, : len(row)] = values % vocabulary, True
        targets[i, : len(row) - 1] = values[1:]
    targets.view(-1)[list(holes)] = -100
    return Batch(ids, targets, mask)


def random_batch(shape: tuple[int, int], vocabulary: int, seed: int, target_share: float = 1.0) -> Batch:
    """Random ids; rows of uneven lengths, of whose positions a share has a target."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, shape, generator=g)
    lengths = torch.randint(max(1, shape[1] // 2), shape[1] + 1, (shape[0], 1), generator=g)
    mask = torch.arange(shape[1]) < lengths
    chosen = (torch.rand(shape, generator=g) < target_share) & mask
    targets = torch.where(chosen, torch.randint(0, vocabulary, shape, generator=g), -100)
    return Batch(ids, targets, mask)


class RandomBatches:
    """Batches by number, each a pure function of it."""

    def __init__(self, shape: tuple[int, int], vocabulary: int, seed: int = 0) -> None:
        self._shape, self._vocabulary, self._seed = shape, vocabulary, seed

    def at(self, index: int) -> Batch:
        return random_batch(self._shape, self._vocabulary, self._seed * 1_000_003 + index, 0.8)
