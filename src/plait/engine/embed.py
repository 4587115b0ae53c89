"""Texts as vectors: the decoder's hidden states after its final norm, pooled over the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.errors import CapacityError, RequestError

POOLINGS = ("last", "mean")


@dataclass
class EmbeddingOutput:
    """embedding: hidden_size numbers."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """One prompt's vector, under vLLM's field names."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


def check_pooling(pooling: str) -> None:
    """RequestError for a pooling that does not exist."""
    if pooling not in POOLINGS:
        raise RequestError(f"pooling={pooling!r} must be one of {', '.join(POOLINGS)}", field="pooling")


def check_ids(ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """What a prompt must satisfy to be embedded. Raises RequestError or CapacityError with the numbers."""
    if len(ids) == 0:
        raise RequestError("a prompt without tokens has no embedding", field="prompt")
    if len(ids) > max_model_len:
        raise CapacityError(
            f"a prompt of {len(ids)} tokens is longer than the context of {max_model_len}", field="prompt"
        )
    wrong = next((i for i in ids if not 0 <= int(i) < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab_size}", field="prompt")


class Pooled:
    """The hidden states of a prompt, added up chunk by chunk.

    count: tokens that have been taken; a prompt that is computed anew adds only those behind them.
    """

    def __init__(self, pooling: str) -> None:
        self.count = 0
        self._mean = pooling == "mean"
        self._sum: NDArray[np.float64] | None = None

    def take(self, first: int, hidden: NDArray[np.float32]) -> None:
        """Hidden states [T, hidden size] of the tokens from position `first` on."""
        new = hidden[max(self.count - first, 0) :]
        if not len(new):
            return
        part = np.add.reduce(new, axis=0, dtype=np.float64) if self._mean else new[-1].astype(np.float64)
        self._sum = self._sum + part if self._mean and self._sum is not None else part
        self.count = first + len(hidden)

    def vector(self) -> NDArray[np.float64]:
        """[hidden size]: the last token's hidden state, or the mean over all."""
        assert self._sum is not None
        return self._sum / self.count if self._mean else self._sum


def normalized(vector: Sequence[float]) -> list[float]:
    """Scaled to Euclidean length 1; zeros stay zeros."""
    values = np.asarray(vector, np.float64)
    return (values / max(float(np.linalg.norm(values)), 1e-12)).tolist()
