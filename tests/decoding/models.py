"""Models that the tests on decoding share: tiny decoders, the same in transformers, and one that recomputes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.model.decoder import Decoder
from plait.ops.step import StepInputs
from tests.memory.tiny_decoders import tiny_decoder

RAGGED = [[7, 2, 11], [3, 1, 4, 1, 5, 9, 2, 6, 5], [20], [8, 8, 2, 13, 0, 6]]


class Recomputing:
    """A `StepModel` without a cache: every step is a forward over the whole sequences."""

    max_positions = None
    device = torch.device("cpu")

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def start(self, reach: Tensor) -> Any:
        return reach, torch.empty(len(reach), 0, dtype=torch.long)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, past: Any) -> tuple[Tensor, Any]:
        reach, before = past
        ids = torch.cat((before, ids), 1)
        hidden = self.decoder(ids, StepInputs(token_mask=mask, reach=reach[:, None].expand_as(ids)))
        return self.decoder.logits(hidden[:, -1]), (reach, ids)

    def select(self, past: Any, rows: Tensor) -> Any:
        return past[0][rows], past[1][rows]


def in_transformers(decoder: Decoder, directory: Path) -> Any:
    """The same model as an object of transformers, fp32."""
    from transformers import AutoModelForCausalLM

    decoder.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def model_pair(family: str, directory: Path, **changes: Any) -> tuple[Decoder, Any]:
    decoder = tiny_decoder(family, **changes)
    return decoder, in_transformers(decoder, directory)
