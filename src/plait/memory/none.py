"""No memory: causal attention over the tokens that are given. Training, scoring and parity tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.memory.attention import masked_attention
from plait.memory.base import MemoryStep, refuse_inputs
from plait.memory.latent import latent_attention, latent_rows
from plait.ops.latent import expands
from plait.ops.spec import AttendSpec, LatentSpec
from plait.ops.step import StepInputs


class NoMemory:
    """Keeps nothing. dropout: probability for attention weights (training)."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def begin(self, ids: Tensor, inputs: StepInputs | None) -> NoMemoryStep:
        inputs = inputs or StepInputs()
        refuse_inputs(inputs, "a forward without memory", "adapter_ids")
        return NoMemoryStep(ids, inputs, self.dropout)


class NoMemoryStep(MemoryStep):
    """Masks by order, padding, segment and window; a row that would see nothing sees itself."""

    def __init__(self, ids: Tensor, inputs: StepInputs, dropout: float) -> None:
        self._flat = ids.ndim == 1
        self._dropout = dropout
        rows, length = (1, ids.shape[0]) if self._flat else (ids.shape[0], ids.shape[1])
        device = ids.device
        self._token_mask = _rows(inputs.token_mask, rows, length, device)
        self._segments = _rows(inputs.segment_ids, rows, length, device)
        if inputs.sequences is not None:
            bounds = inputs.sequences.query_start
            owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
            self._segments = torch.from_numpy(owner).to(device).view(rows, length)
        if inputs.positions is not None:
            positions = torch.as_tensor(inputs.positions, device=device).view(rows, length)
        elif inputs.sequences is not None:
            positions = torch.from_numpy(inputs.sequences.positions()).to(device).view(rows, length)
        else:
            positions = self._derived_positions(rows, length, device)
        self._positions = positions
        self.positions = positions[0] if self._flat else positions
        self._reach = (
            None if inputs.reach is None else torch.as_tensor(inputs.reach, device=device).view_as(self.positions)
        )
        self._masks: dict[int, Tensor | None] = {}

    @property
    def reach(self) -> Tensor:
        """Given, or the length of what is there: the last position of the row and segment, and one."""
        if self._reach is None:
            ends = self._positions + 1
            segments = (
                torch.zeros_like(ends) if self._segments is None else self._segments.unique(return_inverse=True)[1]
            )
            longest = torch.zeros(len(ends), int(segments.max()) + 1, dtype=ends.dtype, device=ends.device)
            reach = longest.scatter_reduce(1, segments, ends, "amax").gather(1, segments)
            self._reach = reach[0] if self._flat else reach
        return self._reach

    def _derived_positions(self, rows: int, length: int, device: torch.device) -> Tensor:
        """Order within the row; counted from the first real token (left padding) and anew in each segment."""
        index = torch.arange(length, device=device).expand(rows, length)
        if self._token_mask is not None:
            index = (self._token_mask.long().cumsum(-1) - 1).clamp(min=0)
        if self._segments is None:
            return index
        starts = torch.ones(rows, length, dtype=torch.bool, device=device)
        starts[:, 1:] = self._segments[:, 1:] != self._segments[:, :-1]
        first = torch.where(starts, index, torch.zeros_like(index)).cummax(-1).values
        return index - first

    def _mask(self, window: int) -> Tensor | None:
        """bool [B or 1, 1, T, T], or None where plain causal order says it all."""
        if window not in self._masks:
            length = self._positions.shape[-1]
            windowed = 0 < window < length
            if not windowed and self._token_mask is None and self._segments is None:
                self._masks[window] = None
            else:
                mask = torch.ones(length, length, dtype=torch.bool, device=self._positions.device).tril()
                mask = mask.unsqueeze(0)
                if windowed:
                    distance = self._positions.unsqueeze(-1) - self._positions.unsqueeze(-2)
                    mask = mask & (distance < window)
                if self._segments is not None:
                    mask = mask & (self._segments.unsqueeze(-1) == self._segments.unsqueeze(-2))
                if self._token_mask is not None:
                    mask = mask & self._token_mask.unsqueeze(-2)
                    itself = torch.eye(length, dtype=torch.bool, device=mask.device)
                    mask = mask | (itself & ~mask.any(-1, keepdim=True))
                self._masks[window] = mask.unsqueeze(1)
        return self._masks[window]

    def attend_tensors(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttendSpec, sinks: Tensor | None = None
    ) -> Tensor:
        if self._flat:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        mask = self._mask(spec.window)
        out = masked_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            spec,
            mask,
            causal=mask is None,
            dropout=self._dropout,
            sinks=None if sinks is None else sinks.unsqueeze(-1),
        ).transpose(1, 2)
        return out[0] if self._flat else out

    def attend_latent_tensors(
        self, layer: int, q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, spec: LatentSpec
    ) -> Tensor:
        rows = latent_rows(latent, k_rope)
        if self._flat:
            q, rows = q.unsqueeze(0), rows.unsqueeze(0)
        mask, length = self._mask(0), q.shape[1]
        out = latent_attention(
            q.transpose(1, 2),
            rows,
            weight,
            spec,
            expands(length, length, spec),
            mask,
            causal=mask is None,
            dropout=self._dropout,
        ).transpose(1, 2)
        return out[0] if self._flat else out


def _rows(value: object, rows: int, length: int, device: torch.device) -> Tensor | None:
    return None if value is None else torch.as_tensor(value, device=device).view(rows, length)
