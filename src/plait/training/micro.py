"""A step's batch cut into micro-batches, and the random numbers that each of them gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from plait.training.batch import Batch


def cut(batch: Batch, micro_tokens: int | None) -> list[Batch]:
    """Consecutive rows, so that rows times the longest of them stay within micro_tokens (one row at least).

    None: one piece. The step does not depend on it, but for `balance_scope: micro` and dropout's numbers.
    """
    if micro_tokens is None:
        return [batch]
    lengths = batch.token_mask.sum(-1).tolist()
    pieces: list[Batch] = []
    start, longest = 0, 0
    for row, length in enumerate(lengths):
        if row > start and max(longest, length) * (row + 1 - start) > micro_tokens:
            pieces.append(batch.rows(start, row))
            start, longest = row, 0
        longest = max(longest, length)
    return [*pieces, batch.rows(start, len(lengths))]


def seed_of(*key: int | str) -> int:
    """A seed in [0, 2^63) that depends on all parts of the key and on nothing else."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def random_numbers(device: str | torch.device, *key: int | str) -> Iterator[None]:
    """torch's random numbers inside are a function of the key (seed, step, micro-batch, ...); outside nothing moves."""
    where = torch.device(device)
    devices = [where.index or 0] if where.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(*key))
        yield
