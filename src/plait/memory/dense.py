"""Dense memory: contiguous key/value tensors for a batch of left-padded rows. Teaching, beams, batched generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.errors import UsageError
from plait.memory.attention import masked_attention
from plait.memory.base import MemoryStep, refuse_inputs
from plait.memory.latent import latent_attention, latent_rows
from plait.ops.latent import expands
from plait.ops.spec import AttendSpec, LatentSpec, LayerCache
from plait.ops.step import StepInputs


def visible_columns(valid: Tensor, positions: Tensor, start: int = 0, window: int = 0) -> Tensor:
    """bool [B, T, C]: which of C columns the queries in columns start .. C - 1 see.

    valid: bool [B, C], False at padding; positions: int64 [B, C], true ones. A key is seen from its own column on, if
    it is no padding, and under a window (0: none) while its position is less than `window` behind.
    """
    columns = torch.arange(valid.shape[-1], device=valid.device)
    mask = (columns <= columns[start:, None]) & valid[:, None, :]
    if window:
        mask = mask & (positions[:, start:, None] - positions[:, None, :] < window)
    return mask


def seeing_itself(mask: Tensor) -> Tensor:
    """The mask [B, T, C] of the last T columns in which a query that saw nothing sees itself, so that its softmax is
    no 0 / 0. Only padding is such a query, and nobody sees it."""
    queries, columns = mask.shape[-2:]
    itself = torch.eye(queries, columns, dtype=torch.bool, device=mask.device).roll(columns - queries, -1)
    return mask | (itself & ~mask.any(-1, keepdim=True))


class DenseMemory:
    """Keys and values [B, Hk, capacity, d] per layer, doubled when full; of a latent layer its rows, as keys of one
    head, and values of no width.

    All rows advance together; a row that is shorter is padded on the left (`token_mask` False), and its positions
    count from its first real token.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        batch: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capacity: int = 64,
    ) -> None:
        self.length = 0
        self._caches = list(caches)
        self._keys = [
            torch.zeros(batch, c.num_kv_heads, capacity, c.key_width, dtype=dtype, device=device) for c in caches
        ]
        self._values = [
            torch.zeros(batch, c.num_kv_heads, capacity, c.value_width, dtype=dtype, device=device) for c in caches
        ]
        self._valid = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self._positions = torch.zeros(batch, capacity, dtype=torch.long, device=device)

    @property
    def row_lengths(self) -> Tensor:
        """Real tokens per row, int64 [B]."""
        return self._valid[:, : self.length].sum(-1)

    def begin(self, ids: Tensor, inputs: StepInputs | None) -> DenseStep:
        inputs = inputs or StepInputs()
        if ids.ndim != 2 or ids.shape[0] != self._valid.shape[0]:
            raise UsageError(f"dense memory of {self._valid.shape[0]} rows needs ids [B, T], got {tuple(ids.shape)}")
        refuse_inputs(inputs, "dense memory", "segment_ids", "sequences", "adapter_ids")
        start, end = self.length, self.length + ids.shape[1]
        self._reserve(end)
        mask = inputs.token_mask
        self._valid[:, start:end] = True if mask is None else torch.as_tensor(mask, device=ids.device)
        if inputs.positions is not None:
            self._positions[:, start:end] = torch.as_tensor(inputs.positions, device=ids.device)
        else:
            counted = self._valid[:, :end].long().cumsum(-1) - 1
            self._positions[:, start:end] = counted[:, start:].clamp(min=0)
        self.length = end
        step = DenseStep(self, start, end)
        step._reach = None if inputs.reach is None else torch.as_tensor(inputs.reach, device=ids.device).view_as(ids)
        return step

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row rows[b] was (beams)."""
        self._keys = [k.index_select(0, rows) for k in self._keys]
        self._values = [v.index_select(0, rows) for v in self._values]
        self._valid = self._valid.index_select(0, rows)
        self._positions = self._positions.index_select(0, rows)

    def _reserve(self, length: int) -> None:
        capacity = self._valid.shape[1]
        if length <= capacity:
            return
        more = max(length, 2 * capacity) - capacity
        pad = torch.nn.functional.pad
        self._keys = [pad(k, (0, 0, 0, more)) for k in self._keys]
        self._values = [pad(v, (0, 0, 0, more)) for v in self._values]
        self._valid = pad(self._valid, (0, more))
        self._positions = pad(self._positions, (0, more))


class DenseStep(MemoryStep):
    """Columns start .. end - 1 are this step's."""

    def __init__(self, memory: DenseMemory, start: int, end: int) -> None:
        self._memory, self._start, self._end = memory, start, end
        self.positions = memory._positions[:, start:end]
        self._masks: dict[int, Tensor] = {}

    def _mask(self, window: int) -> Tensor:
        """bool [B, 1, T, C]; a row that would see nothing sees itself."""
        if window not in self._masks:
            m, end = self._memory, self._end
            mask = visible_columns(m._valid[:, :end], m._positions[:, :end], self._start, window)
            self._masks[window] = seeing_itself(mask).unsqueeze(1)
        return self._masks[window]

    def attend_tensors(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttendSpec, sinks: Tensor | None = None
    ) -> Tensor:
        m, start, end = self._memory, self._start, self._end
        m._keys[layer][:, :, start:end] = k.transpose(1, 2)
        m._values[layer][:, :, start:end] = v.transpose(1, 2)
        keys, values = m._keys[layer][:, :, :end], m._values[layer][:, :, :end]
        sinks = None if sinks is None else sinks.unsqueeze(-1)
        mask = self._mask(spec.window)
        return masked_attention(q.transpose(1, 2), keys, values, spec, mask, sinks=sinks).transpose(1, 2)

    def attend_latent_tensors(
        self, layer: int, q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, spec: LatentSpec
    ) -> Tensor:
        m, start, end = self._memory, self._start, self._end
        cached = m._keys[layer][:, 0]
        cached[:, start:end] = latent_rows(latent, k_rope)
        form = expands(end - start, end, spec)
        return latent_attention(q.transpose(1, 2), cached[:, :end], weight, spec, form, self._mask(0)).transpose(1, 2)
