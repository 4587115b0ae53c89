"""What decodes: one step over a batch, behind the same four arguments for plait's decoder and for any other model.

`forward(ids, mask, positions, past) -> (logits, past)`: ids int64 [B, T] of this step; mask bool [B, C], False at
padding, of every column up to now, the step's included; positions int64 [B, T]; past: what the last step gave, or
None. Logits are fp32 [B, V], those of the step's last column. What `past` is, is the model's own business.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import UsageError
from plait.memory.dense import DenseMemory
from plait.model.decoder import Decoder
from plait.ops.step import StepInputs


class StepModel(Protocol):
    """A model that strategies can decode with. max_positions: the longest sequence, None where nobody knows."""

    max_positions: int | None
    device: torch.device

    def start(self, reach: Tensor) -> Any:
        """The past before the first step of a batch. reach: int64 [B], the most tokens that each row will ever have."""
        ...

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, past: Any) -> tuple[Tensor, Any]:
        """One step, as above."""
        ...

    def select(self, past: Any, rows: Tensor) -> Any:
        """The past whose row b is what row rows[b] was: beams are reordered, finished rows left out."""
        ...


@dataclass
class DecoderPast:
    """A dense memory, and the length that each row will reach (LongRoPE chooses its table by it)."""

    memory: DenseMemory
    reach: Tensor


@dataclass
class DecoderModel:
    """plait's decoder on a `DenseMemory`. Dropout is the caller's business (`evaluating`)."""

    decoder: Decoder
    max_positions: int | None = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.max_positions = self.decoder.config.max_positions
        self.device = self.decoder.device

    def start(self, reach: Tensor) -> DecoderPast:
        caches = self.decoder.config.caches()
        return DecoderPast(DenseMemory(caches, len(reach), self.decoder.dtype, self.device), reach)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, past: DecoderPast) -> tuple[Tensor, DecoderPast]:
        columns = mask[:, -ids.shape[1] :]
        inputs = StepInputs(positions=positions, token_mask=columns, reach=past.reach[:, None].expand_as(ids))
        hidden = self.decoder(ids, inputs, past.memory)
        return self.decoder.logits(hidden[:, -1]), past

    def select(self, past: DecoderPast, rows: Tensor) -> DecoderPast:
        past.memory.reorder(rows)
        return DecoderPast(past.memory, past.reach[rows])


@dataclass
class HuggingFaceModel:
    """A causal model object of transformers, with its own cache. It is given positions where it takes them."""

    model: Any
    max_positions: int | None = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.max_positions = getattr(self.model.config, "max_position_embeddings", None)
        self.device = self.model.device
        self._takes = set(inspect.signature(self.model.forward).parameters)

    def start(self, reach: Tensor) -> None:
        return None

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, past: Any) -> tuple[Tensor, Any]:
        more: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        more = {name: value for name, value in more.items() if name in self._takes}
        out = self.model(input_ids=ids, attention_mask=mask.long(), past_key_values=past, use_cache=True, **more)
        return out.logits[:, -1].float(), out.past_key_values

    def select(self, past: Any, rows: Tensor) -> Any:
        if not hasattr(past, "batch_select_indices"):
            raise UsageError(f"the cache of {type(self.model).__name__} ({type(past).__name__}) cannot select rows")
        past.batch_select_indices(rows)
        return past


def step_model(model: Any) -> StepModel:
    """A decoder, a model object of transformers, or what already is a `StepModel`. Raises UsageError for others."""
    if isinstance(model, Decoder):
        return DecoderModel(model)
    if all(hasattr(model, name) for name in ("start", "forward", "select", "max_positions", "device")):
        return model
    if isinstance(model, torch.nn.Module) and hasattr(model, "config") and hasattr(model, "get_output_embeddings"):
        return HuggingFaceModel(model)
    raise UsageError(f"cannot decode with a {type(model).__name__}: give a Decoder or a causal model of transformers")
