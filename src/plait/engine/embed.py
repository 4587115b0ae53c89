"""Texts as vectors: the decoder's hidden states after its final norm, pooled over the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.errors import CapacityError, RequestError

if TYPE_CHECKING:
    from plait.model.decoder import Decoder

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


def embed_ids(decoder: Decoder, ids: Sequence[int], pooling: str, normalize: bool) -> list[float]:
    """The vector [hidden_size] of token ids [N]: the last token's hidden state, or the mean over all, in fp32.

    normalize: scaled to Euclidean length 1.
    """
    import torch

    from plait.model.decoder import evaluating

    with evaluating(decoder), torch.inference_mode():
        hidden = decoder(torch.tensor(list(ids), dtype=torch.long, device=decoder.device)).float()
        vector = hidden[-1] if pooling == "last" else hidden.mean(0)
        if normalize:
            vector = torch.nn.functional.normalize(vector, dim=0)
        return vector.cpu().tolist()
