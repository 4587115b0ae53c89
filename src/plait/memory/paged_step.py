"""One step over paged memory: where its keys and values go, and what each sequence reads. The reference of serving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.memory.attention import masked_attention, visible
from plait.memory.base import MemoryStep
from plait.memory.latent import latent_attention, latent_rows
from plait.memory.layout import CacheGroup, CacheLayout
from plait.ops.latent import expands
from plait.ops.spec import AttendSpec, LatentSpec
from plait.ops.step import Sequences

# Sequences that decode together are padded to the longest of them; one that is this much longer starts another batch.
PADDING_RATIO = 1.5
PADDING_BLOCKS = 4


@dataclass(frozen=True)
class Prefill:
    """A sequence with several queries: flat rows [start, stop), the blocks that it reads, and keys [low, high) in them.

    fresh: nothing of it was cached before this step. mask: bool [T, C], None where plain causal order says it all.
    """

    start: int
    stop: int
    blocks: Tensor
    low: int
    high: int
    fresh: bool
    mask: Tensor | None


@dataclass(frozen=True)
class Decode:
    """Sequences with one query each, padded to equal width.

    rows: their flat rows [S]. contexts: how many keys each has [S]. blocks: [S * B]. low, high: the keys that are read,
    when S is 1. mask: bool [S, 1, 1, C], None when S is 1. stale: (sequence, key) indices of rows beyond a sequence's
    end.
    """

    rows: Tensor
    count: int
    contexts: NDArray
    blocks: Tensor
    low: int
    high: int
    mask: Tensor | None
    stale: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class GroupStep:
    """What a cache group's layers do in a step. write: (block, offset) of every flat token."""

    write: tuple[Tensor, Tensor]
    prefills: list[Prefill]
    decodes: list[Decode]


class PagedStep(MemoryStep):
    """Writes the step's keys and values, then attends through the tables. Windowed groups read only visible blocks.

    views: layer -> (group, keys [blocks, tokens, Hk * dk], values [blocks, tokens, Hk * dv]), as `slot_views` gives
    them.
    """

    def __init__(
        self,
        layout: CacheLayout,
        views: Mapping[int, tuple[int, Tensor, Tensor]],
        sequences: Sequences,
        device: torch.device,
    ) -> None:
        self._views = views
        self._sequences = sequences
        self._device = device
        self._query_len = np.diff(sequences.query_start)
        self._first = sequences.context_len - self._query_len
        positions = sequences.positions()
        owner = np.repeat(np.arange(sequences.count), self._query_len)
        self._groups = [self._plan(g, group, owner, positions) for g, group in enumerate(layout.groups)]

    def _tensor(self, array: NDArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _plan(self, g: int, group: CacheGroup, owner: NDArray, positions: NDArray) -> GroupStep:
        s, tokens, window = self._sequences, group.block_tokens, group.cache.window
        assert s.block_table is not None
        table = s.block_table[g].astype(np.int64)
        oldest = np.maximum(self._first - window + 1, 0) if window else np.zeros_like(self._first)
        begin, end = oldest // tokens, -(-s.context_len // tokens)
        write = (self._tensor(table[owner, positions // tokens]), self._tensor((positions % tokens).astype(np.int64)))
        prefills = [
            self._prefill(
                int(i), self._tensor(table[i, begin[i] : end[i]]), int(oldest[i]), int(begin[i]) * tokens, window
            )
            for i in np.flatnonzero(self._query_len > 1)
        ]
        decodes = [
            self._decode(which, table, begin[which], end[which], oldest[which], tokens)
            for which in _alike(np.flatnonzero(self._query_len == 1), end - begin)
        ]
        return GroupStep(write, prefills, decodes)

    def _prefill(self, i: int, blocks: Tensor, oldest: int, base: int, window: int) -> Prefill:
        """Sequence i; its oldest visible key, and the position of the first row of its first block."""
        s, first, context = self._sequences, int(self._first[i]), int(self._sequences.context_len[i])
        mask = None
        if first or 0 < window < context:
            keys = torch.arange(oldest, context, device=self._device)
            mask = visible(torch.arange(first, context, device=self._device), keys, window)
        start, stop = int(s.query_start[i]), int(s.query_start[i + 1])
        return Prefill(start, stop, blocks, oldest - base, context - base, first == 0, mask)

    def _decode(
        self, which: NDArray, table: NDArray, begin: NDArray, end: NDArray, oldest: NDArray, tokens: int
    ) -> Decode:
        s, base = self._sequences, begin * tokens
        context = s.context_len[which]
        width = int((end - begin).max())
        columns = begin[:, None] + np.arange(width)
        inside = columns < end[:, None]
        # The null block pads: its rows are zero and never written.
        blocks = np.where(inside, np.take_along_axis(table[which], np.minimum(columns, table.shape[1] - 1), 1), 0)
        rows, flat = self._tensor(s.query_start[which].astype(np.int64)), self._tensor(blocks.ravel())
        if len(which) == 1:
            return Decode(rows, 1, context, flat, int(oldest[0] - base[0]), int(context[0] - base[0]), None, None)
        keys = base[:, None] + np.arange(width * tokens)
        seen = (keys >= oldest[:, None]) & (keys < context[:, None])
        stale = np.nonzero((keys >= context[:, None]) & (keys < end[:, None] * tokens))
        mask = self._tensor(seen)[:, None, None, :]
        pair = (self._tensor(stale[0]), self._tensor(stale[1])) if len(stale[0]) else None
        return Decode(rows, len(which), context, flat, 0, width * tokens, mask, pair)

    def attend_tensors(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttendSpec, sinks: Tensor | None = None
    ) -> Tensor:
        g, keys, values = self._views[layer]
        group = self._groups[g]
        keys.index_put_(group.write, k.flatten(1).to(keys.dtype))
        values.index_put_(group.write, v.flatten(1).to(values.dtype))
        if len(group.decodes) == 1 and not group.prefills:
            return _attend_decode(q, keys, values, group.decodes[0], spec, sinks)
        of_heads = None if sinks is None else sinks.unsqueeze(-1)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.value_width)
        for p in group.prefills:
            rows = slice(p.start, p.stop)
            # A prompt's first chunk attends to what was just written; nothing older is in the cache. Where the cache is
            # narrower than the computation, it is read as rounded as every later chunk will read it.
            if p.fresh:
                old_k, old_v = (t[rows].to(keys.dtype).to(q.dtype) for t in (k, v))
            else:
                old_k, old_v = _gather(keys, values, p, spec, q.dtype)
            q_, k_, v_ = (t.transpose(0, 1).unsqueeze(0) for t in (q[rows], old_k, old_v))
            attended = masked_attention(q_, k_, v_, spec, p.mask, causal=p.mask is None, sinks=of_heads)
            out[rows] = attended[0].transpose(0, 1)
        for d in group.decodes:
            out[d.rows] = _attend_decode(q[d.rows], keys, values, d, spec, sinks)
        return out

    def attend_latent_tensors(
        self, layer: int, q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, spec: LatentSpec
    ) -> Tensor:
        g, cached, _ = self._views[layer]
        group, new = self._groups[g], latent_rows(latent, k_rope)
        cached.index_put_(group.write, new.to(cached.dtype))
        out = q.new_empty(q.shape[0], spec.num_heads, spec.value_width)
        for p in group.prefills:
            part = slice(p.start, p.stop)
            rows = new[part].to(cached.dtype) if p.fresh else _read(cached, p)
            queries, form = q[part].transpose(0, 1).unsqueeze(0), expands(p.stop - p.start, p.high - p.low, spec)
            heads = latent_attention(
                queries, rows.to(q.dtype).unsqueeze(0), weight, spec, form, p.mask, causal=p.mask is None
            )
            out[part] = heads[0].transpose(0, 1)
        for d in group.decodes:
            out[d.rows] = _attend_latent_decode(q[d.rows], cached, weight, d, spec)
        return out


def slot_views(numbers: Tensor, group: CacheGroup) -> tuple[Tensor, Tensor]:
    """Keys [blocks, tokens, Hk * dk] and values [blocks, tokens, Hk * dv] of one layer slot [blocks, numbers]; of a
    latent layer its rows, and values of no width."""
    tokens, (k, v) = (
        group.block_tokens,
        (group.cache.num_kv_heads * width for width in (group.cache.key_width, group.cache.value_width)),
    )
    keys = numbers[:, : tokens * k].unflatten(1, (tokens, k))
    return keys, numbers[:, tokens * k : tokens * (k + v)].unflatten(1, (tokens, v))


def _alike(which: NDArray, blocks: NDArray) -> Iterator[NDArray]:
    """The sequences cut into batches whose numbers of blocks are alike; one batch keeps their order."""
    if not len(which):
        return
    counts = blocks[which]
    if counts.max() <= counts.min() * PADDING_RATIO + PADDING_BLOCKS:
        yield which
        return
    which = which[np.argsort(counts, kind="stable")]
    start = 0
    for i in range(1, len(which)):
        if blocks[which[i]] > blocks[which[start]] * PADDING_RATIO + PADDING_BLOCKS:
            yield which[start:i]
            start = i
    yield which[start:]


def _gather(keys: Tensor, values: Tensor, p: Prefill, spec: AttendSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys and values that a prefill reads: [L, Hk, dk], [L, Hk, dv]."""
    k, v = (_read(t, p).unflatten(1, (spec.num_kv_heads, -1)) for t in (keys, values))
    return k.to(dtype), v.to(dtype)


def _read(cached: Tensor, p: Prefill) -> Tensor:
    """The rows that a prefill reads: [L, width]."""
    return cached.index_select(0, p.blocks).flatten(0, 1)[p.low : p.high]


def _attend_decode(
    q: Tensor, keys: Tensor, values: Tensor, d: Decode, spec: AttendSpec, sinks: Tensor | None
) -> Tensor:
    """One query per sequence, q [S, H, dk] -> [S, H, dv].

    The heads of a query group stand where several queries would, so each key is read once for all of them.
    """
    k, v = (
        t.index_select(0, d.blocks).view(d.count, -1, spec.num_kv_heads, width)[:, d.low : d.high]
        for t, width in ((keys, spec.key_width), (values, spec.value_width))
    )
    if d.stale is not None:
        # A weight of 0 does not hide a row beyond the end: it may hold NaN from an earlier owner, and 0 * NaN is NaN.
        k[d.stale], v[d.stale] = 0, 0
    k, v = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
    grouped = q.view(d.count, spec.num_kv_heads, -1, spec.key_width)
    sinks = None if sinks is None else sinks.view(spec.num_kv_heads, -1)
    out = masked_attention(grouped, k, v, spec, d.mask, sinks=sinks)
    return out.reshape(d.count, spec.num_heads, spec.value_width)


def _attend_latent_decode(q: Tensor, cached: Tensor, weight: Tensor, d: Decode, spec: LatentSpec) -> Tensor:
    """One query per sequence, q [S, H, nope + rope] -> [S, H, v]; each sequence in the form that is cheaper for it."""
    rows = cached.index_select(0, d.blocks).view(d.count, -1, spec.row_width)[:, d.low : d.high]
    if d.stale is not None:
        rows[d.stale] = 0
    rows, queries = rows.to(q.dtype), q.unsqueeze(2)
    forms = np.array([expands(1, context, spec) for context in d.contexts.tolist()])
    if d.mask is None or forms.all() or not forms.any():
        return latent_attention(queries, rows, weight, spec, bool(forms[0]), d.mask).squeeze(2)
    out = q.new_empty(d.count, spec.num_heads, spec.value_width)
    for form in (False, True):
        which = torch.from_numpy(np.flatnonzero(forms == form)).to(q.device)
        out[which] = latent_attention(queries[which], rows[which], weight, spec, form, d.mask[which]).squeeze(2)
    return out
