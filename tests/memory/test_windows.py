"""How many keys a query of a windowed layer sees: itself and the window - 1 before it, in every memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.memory.dense import DenseMemory
from plait.memory.layout import make_layout
from plait.memory.none import NoMemory
from plait.memory.paged import PagedMemory
from plait.ops.spec import AttendSpec, LayerCache
from plait.ops.step import Sequences, StepInputs

TOKENS, WINDOW = 10, 4
SPEC = AttendSpec(1, 1, 2, TOKENS, 1.0, window=WINDOW)
CACHE = LayerCache(1, 2, TOKENS, WINDOW)
QUERIES = KEYS = torch.zeros(TOKENS, 1, 2)
VALUES = torch.eye(TOKENS).unsqueeze(1)


def plain(chunk: int) -> torch.Tensor:
    return NoMemory().begin(torch.zeros(TOKENS), None).attend_tensors(0, QUERIES, KEYS, VALUES, SPEC)


def dense(chunk: int) -> torch.Tensor:
    memory, parts = DenseMemory([CACHE], 1, capacity=2), []
    for q, k, v in zip(QUERIES.split(chunk), KEYS.split(chunk), VALUES.split(chunk), strict=True):
        step = memory.begin(torch.zeros(1, len(q)), None)
        parts.append(step.attend_tensors(0, q[None], k[None], v[None], SPEC)[0])
    return torch.cat(parts)


def paged(chunk: int) -> torch.Tensor:
    layout = make_layout([CACHE], 4, TOKENS, TOKENS, block_tokens=4)
    memory, parts, length = PagedMemory(layout, 4), [], 0
    for q, k, v in zip(QUERIES.split(chunk), KEYS.split(chunk), VALUES.split(chunk), strict=True):
        length += len(q)
        table = np.array([[[1, 2, 3]]], np.int32)
        sequences = Sequences(np.array([0, len(q)], np.int32), np.array([length], np.int32), table)
        step = memory.begin(torch.zeros(len(q), dtype=torch.long), StepInputs(sequences=sequences))
        parts.append(step.attend_tensors(0, q, k, v, SPEC))
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [TOKENS, 3, 1])
@pytest.mark.parametrize("memory", [plain, dense, paged])
def test_a_window_counts_the_token_itself(memory, chunk: int) -> None:
    """All scores are equal and value i is the i-th unit vector, so that what comes out are the weights."""
    weights = memory(chunk)[:, 0]
    for query, row in enumerate(weights):
        seen = min(query + 1, WINDOW)
        expected = torch.zeros(TOKENS)
        expected[query + 1 - seen : query + 1] = 1 / seen
        torch.testing.assert_close(row, expected)
