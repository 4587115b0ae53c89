"""Paged memory: keys and values in fixed-size blocks of one pool, reached through block tables. Serving.

A block is `layout.block_bytes` opaque bytes; only this file knows that the pool lies layer slot by layer slot
[group_layers, num_blocks, layer_bytes], each block of a slot holding block_tokens rows of keys and then of values.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import UsageError
from plait.memory.attention import masked_attention, visible
from plait.memory.base import MemoryStep
from plait.memory.layout import CacheGroup, CacheLayout
from plait.ops.spec import AttendSpec
from plait.ops.step import Sequences, StepInputs


class PagedMemory:
    """The pool. Block 0 is the null block: never written, so its rows stay zero.

    On the CPU the pool is an anonymous map: pages that no block has touched cost nothing.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype.itemsize != layout.bytes_per_number:
            raise UsageError(f"layout has {layout.bytes_per_number} bytes per number, {dtype} has {dtype.itemsize}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = torch.device(device)
        self.pool_bytes = num_blocks * layout.block_bytes
        if self.device.type == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            flat = torch.frombuffer(mmap.mmap(-1, max(self.pool_bytes, 1), flags=flags), dtype=torch.uint8)
        else:
            flat = torch.zeros(self.pool_bytes, dtype=torch.uint8, device=self.device)
        self._pool = flat[: self.pool_bytes].view(layout.group_layers, num_blocks, layout.layer_bytes)
        self._views: dict[int, tuple[int, Tensor, Tensor]] = {}
        for g, group in enumerate(layout.groups):
            for slot, layer in enumerate(group.layers):
                self._views[layer] = (g, *self._layer_views(group, slot))

    def _layer_views(self, group: CacheGroup, slot: int) -> tuple[Tensor, Tensor]:
        """Keys [blocks, tokens, Hk * dk] and values [blocks, tokens, Hk * dv] of one layer slot."""
        cache, tokens = group.cache, group.block_tokens
        numbers = self._pool[slot].view(self.dtype)
        k, v = (tokens * cache.num_kv_heads * w for w in (cache.key_width, cache.value_width))
        keys = numbers[:, :k].unflatten(1, (tokens, -1))
        return keys, numbers[:, k : k + v].unflatten(1, (tokens, -1))

    def begin(self, ids: Tensor, inputs: StepInputs | None) -> PagedStep:
        if inputs is None or inputs.sequences is None or inputs.sequences.block_table is None or ids.ndim != 1:
            raise UsageError("paged memory needs flat ids [N] and sequences with a block table")
        sequences = inputs.sequences
        self.copy_blocks(sequences.copies)
        step = PagedStep(self, sequences)
        positions = inputs.positions
        step.positions = torch.from_numpy(sequences.positions()) if positions is None else torch.as_tensor(positions)
        step.positions = step.positions.to(self.device)
        return step

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks, (source, destination) in order."""
        for source, target in pairs.tolist():
            self._pool[:, target] = self._pool[:, source]

    def read_block(self, block: int) -> bytes:
        """The bytes of a block, in the order that `write_block` takes."""
        return self._pool[:, block].cpu().numpy().tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        """Put back what `read_block` gave."""
        numbers = np.frombuffer(data, np.uint8).reshape(self._pool.shape[0], -1).copy()
        self._pool[:, block] = torch.from_numpy(numbers).to(self.device)

    def touched_bytes(self) -> int | None:
        """Bytes of the pool that lie in memory now; None where the platform does not say."""
        return None if self.device.type != "cpu" else _resident(self._pool)


def _resident(pool: Tensor) -> int | None:
    """Resident size of the pool's map from /proc (Linux)."""
    address = pool.data_ptr()
    try:
        inside = False
        with open("/proc/self/smaps") as lines:
            for line in lines:
                first = line.split(" ", 1)[0]
                if "-" in first and first.replace("-", "").isalnum():
                    low, high = (int(x, 16) for x in first.split("-"))
                    inside = low <= address < high
                elif inside and line.startswith("Rss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


@dataclass(frozen=True)
class _Prefill:
    """A sequence with several queries: flat rows [start, stop), the blocks to read, and the keys [low, high) in
    them."""

    start: int
    stop: int
    blocks: Tensor
    low: int
    high: int
    fresh: bool
    mask: Tensor | None


@dataclass(frozen=True)
class _Decode:
    """Sequences with one query each: flat rows [S], blocks [S * B], visible [S, 1, 1, B * tokens] or None with (low,
    high)."""

    rows: Tensor
    count: int
    blocks: Tensor
    low: int
    high: int
    mask: Tensor | None


@dataclass(frozen=True)
class _GroupStep:
    write_block: Tensor
    write_offset: Tensor
    prefills: list[_Prefill]
    decode: _Decode | None


class PagedStep(MemoryStep):
    """Writes the step's keys and values, then attends through the tables. Windowed groups read only visible blocks."""

    def __init__(self, memory: PagedMemory, sequences: Sequences) -> None:
        self._memory = memory
        self._sequences = sequences
        positions = sequences.positions()
        owner = np.repeat(np.arange(sequences.count), np.diff(sequences.query_start))
        self._groups = [self._plan(g, group, owner, positions) for g, group in enumerate(memory.layout.groups)]

    def _tensor(self, array: NDArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._memory.device)

    def _plan(self, g: int, group: CacheGroup, owner: NDArray, positions: NDArray) -> _GroupStep:
        s, tokens, window = self._sequences, group.block_tokens, group.cache.window
        assert s.block_table is not None
        table = s.block_table[g]
        query_len = np.diff(s.query_start)
        first = s.context_len - query_len
        oldest = np.maximum(first - window + 1, 0) if window else np.zeros_like(first)
        begin = oldest // tokens
        end = -(-s.context_len // tokens)
        prefills = []
        for i in np.flatnonzero(query_len > 1):
            low, high = int(oldest[i] - begin[i] * tokens), int(s.context_len[i] - begin[i] * tokens)
            fresh = first[i] == 0
            mask = None
            if not fresh or 0 < window < query_len[i]:
                keys = torch.arange(int(oldest[i]), int(s.context_len[i]), device=self._memory.device)
                queries = torch.arange(int(first[i]), int(s.context_len[i]), device=self._memory.device)
                mask = visible(queries, keys, window)
            blocks = self._tensor(table[i, begin[i] : end[i]].astype(np.int64))
            prefills.append(
                _Prefill(int(s.query_start[i]), int(s.query_start[i + 1]), blocks, low, high, bool(fresh), mask)
            )
        return _GroupStep(
            self._tensor(table[owner, positions // tokens].astype(np.int64)),
            self._tensor((positions % tokens).astype(np.int64)),
            prefills,
            self._plan_decode(table, np.flatnonzero(query_len == 1), begin, end, oldest, tokens),
        )

    def _plan_decode(
        self, table: NDArray, which: NDArray, begin: NDArray, end: NDArray, oldest: NDArray, tokens: int
    ) -> _Decode | None:
        if not len(which):
            return None
        s = self._sequences
        begin, end, oldest, context = begin[which], end[which], oldest[which], s.context_len[which]
        width = int((end - begin).max())
        columns = begin[:, None] + np.arange(width)
        inside = columns < end[:, None]
        blocks = np.where(inside, np.take_along_axis(table[which], np.minimum(columns, table.shape[1] - 1), 1), 0)
        rows = self._tensor(s.query_start[which].astype(np.int64))
        flat = self._tensor(blocks.ravel().astype(np.int64))
        if len(which) == 1:
            low, high = int(oldest[0] - begin[0] * tokens), int(context[0] - begin[0] * tokens)
            return _Decode(rows, 1, flat, low, high, None)
        keys = begin[:, None] * tokens + np.arange(width * tokens)
        seen = (keys >= oldest[:, None]) & (keys < context[:, None])
        return _Decode(rows, len(which), flat, 0, width * tokens, self._tensor(seen))

    def attend_tensors(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttendSpec) -> Tensor:
        g, keys, values = self._memory._views[layer]
        group = self._groups[g]
        where = (group.write_block, group.write_offset)
        keys.index_put_(where, k.flatten(1).to(keys.dtype))
        values.index_put_(where, v.flatten(1).to(values.dtype))
        decode = group.decode
        if decode is not None and not group.prefills:
            return self._attend_decode(q, keys, values, decode, spec)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.value_width)
        for p in group.prefills:
            part = slice(p.start, p.stop)
            # A prompt's first chunk attends to what was just computed; nothing older is in the cache.
            old = (k[part], v[part]) if p.fresh else self._gather(keys, values, p.blocks, p.low, p.high, spec, q.dtype)
            rows = masked_attention(
                q[part].transpose(0, 1).unsqueeze(0),
                old[0].transpose(0, 1).unsqueeze(0),
                old[1].transpose(0, 1).unsqueeze(0),
                spec,
                p.mask,
                causal=p.mask is None,
            )
            out[part] = rows[0].transpose(0, 1)
        if decode is not None:
            out[decode.rows] = self._attend_decode(q[decode.rows], keys, values, decode, spec)
        return out

    @staticmethod
    def _gather(
        keys: Tensor, values: Tensor, blocks: Tensor, low: int, high: int, spec: AttendSpec, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Rows low .. high - 1 of the listed blocks: [L, Hk, dk], [L, Hk, dv]."""
        k = keys.index_select(0, blocks).flatten(0, 1)[low:high].unflatten(1, (spec.num_kv_heads, -1))
        v = values.index_select(0, blocks).flatten(0, 1)[low:high].unflatten(1, (spec.num_kv_heads, -1))
        return k.to(dtype), v.to(dtype)

    def _attend_decode(self, q: Tensor, keys: Tensor, values: Tensor, d: _Decode, spec: AttendSpec) -> Tensor:
        """One query per sequence; the heads of a group stand where several queries would, so each key is read once."""
        k, v = (
            t.index_select(0, d.blocks).view(d.count, -1, spec.num_kv_heads, width)[:, d.low : d.high]
            for t, width in ((keys, spec.key_width), (values, spec.value_width))
        )
        mask = None
        if d.mask is not None:
            # Rows beyond a sequence's end are stale and may hold NaN; zero them, since 0 * NaN is NaN.
            hidden = ~d.mask[:, :, None, None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
            mask = d.mask[:, None, None, :]
        k, v = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
        grouped = q.view(d.count, spec.num_kv_heads, -1, spec.key_width)
        return masked_attention(grouped, k, v, spec, mask).reshape(d.count, spec.num_heads, spec.value_width)
