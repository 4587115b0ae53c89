"""A numpy model of the native runtime: what a lowered list means, in float64, over one arena of bytes.

It reads and writes the arena where the buffers say, starts from garbage, and hands out the rows of a stage in pieces of
random size and order, so memory that is reused too early shows. Quantised records are written as they should lie, and
must be found untouched, but (unless `rounds`) what is read is the numbers before rounding: a plan then equals its
recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from math import erf

import numpy as np

from plait.kernels.abi import (
    ACTIVATIONS,
    FLOAT_LAYOUTS,
    GATES,
    KIND_I32,
    KIND_Q8,
    ROUTE_MASKED_ZERO,
    ROUTE_TWO_BEST,
    ROUTER_SCORES,
    ROWS_TOKENS,
    XIELU,
)
from plait.memory.layout import CacheLayout
from plait.ops.step import StepInputs
from plait.plan.lowered import Lowered, PlanOp, quantised_row_bytes

# Stages of their own; operations of the other kinds that follow one another share a stage.
_STAGES = ("linear", "gated", "activated", "experts", "attend", "attend_latent", "logits", "select_rows", "host")
_NAMES = {number: name for name, number in ACTIVATIONS.items()}
_FUNCTIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(erf, otypes=[float])(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def _gate(kind: int, numbers: tuple[float, ...], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if kind != GATES["clamped_swiglu"]:
        return _FUNCTIONS[_NAMES[kind]](x) * y
    alpha, limit = numbers
    g, u = np.minimum(x, limit), y.clip(-limit, limit)
    return g / (1 + np.exp(-alpha * g)) * (u + 1)


def _xielu(x: np.ndarray, alpha_p: float, alpha_n: float, beta: float, eps: float) -> np.ndarray:
    p, n = np.log1p(np.exp(alpha_p)), beta + np.log1p(np.exp(alpha_n))
    return np.where(x > 0, p * x * x, n * (np.expm1(np.minimum(x, eps)) - x)) + beta * x


class PlanModel:
    """Runs a plan without HOST operations. weights: name -> what has `layout` and `expand()`.

    rounds: whether quantised activations are rounded, as the runtime does.
    """

    def __init__(
        self,
        plan: Lowered,
        weights: Mapping,
        layout: CacheLayout,
        num_blocks: int,
        seed: int = 0,
        rounds: bool = False,
    ) -> None:
        self.plan = plan
        self.rounds = rounds
        self.random = np.random.default_rng(seed)
        self.arena = np.full(plan.arena_bytes, 0xFF, np.uint8)  # every float a NaN
        self.quantised = [weights[m.name].layout not in (*FLOAT_LAYOUTS, "VECTOR") for m in plan.matrices]
        # What a second layout holds is told by the first; the model reads that one.
        self.matrices = [self._numbers(weights, m) for m in plan.matrices]
        self.layout = layout
        self.keys, self.values = {}, {}
        self.exact: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # buffer -> its records, and the numbers in them
        for number, layer in enumerate(plan.caches):
            group = layout.groups[layout.slot(layer)[0]]
            c = group.cache
            shape = (num_blocks, group.block_tokens, c.num_kv_heads)
            self.keys[number] = np.full((*shape, c.key_width), np.nan)
            self.values[number] = np.full((*shape, c.value_width), np.nan)

    @staticmethod
    def _numbers(weights: Mapping, matrix) -> np.ndarray:
        numbers = weights[matrix.name].expand().astype(np.float64)
        return numbers if matrix.rows is None else numbers[slice(*matrix.rows)]

    def step(self, ids: np.ndarray, inputs: StepInputs) -> tuple[np.ndarray, np.ndarray]:
        """-> logits float64 [R, V], hidden float32 [N, D]."""
        self.ids, self.s, self.rows = ids, inputs.sequences, np.asarray(inputs.logit_rows)
        self.position = self.s.positions()
        self.logits, self.hidden = None, np.empty((len(ids), self.plan.hidden_size), np.float32)
        for rows, run in groupby(self.plan.ops, self._rows_of_row_op):
            ops = list(run)
            if rows >= 0:
                count = len(ids) if rows == ROWS_TOKENS else len(self.rows)
                cuts = np.unique([0, count, *self.random.integers(0, count + 1, 3)])
                for i in self.random.permutation(len(cuts) - 1):
                    for op in ops:
                        self._row_op(op, np.arange(cuts[i], cuts[i + 1]))
            else:
                for op in ops:
                    getattr(self, "_" + op.kind)(op)
        return self.logits, self.hidden

    def _rows_of_row_op(self, op: PlanOp) -> int:
        """Whose rows a row operation goes over; -1 for what is a stage of its own."""
        if op.kind in _STAGES:
            return -1
        return self.plan.buffers[op.inputs[0] if op.kind in ("write_kv", "hidden") else op.outputs[0]].rows

    # Buffers

    def raw(self, number: int) -> np.ndarray:
        """Bytes [rows, numbers' bytes] of a buffer, as many rows as fit: a view."""
        b = self.plan.buffers[number]
        size = self.row_size(number)
        most = (len(self.arena) - b.offset - size) // b.row_bytes + 1
        return np.lib.stride_tricks.as_strided(self.arena[b.offset :], (most, size), (b.row_bytes, 1))

    def row_size(self, number: int) -> int:
        b = self.plan.buffers[number]
        return b.row_bytes if b.kind == KIND_Q8 else 4 * b.width

    def read(self, number: int, rows: np.ndarray) -> np.ndarray:
        """float64 [rows, width], a copy; of quantised records what they were made from."""
        raw = self.raw(number)[rows].copy()
        b = self.plan.buffers[number]
        if b.kind == KIND_I32:
            return raw.view(np.int32)
        if b.kind != KIND_Q8:
            return raw.view(np.float32).astype(np.float64)
        record, exact = self.exact[number]
        assert (record[rows] == raw).all(), "a record was overwritten before it was read"
        if not self.rounds:
            return exact[rows]
        return self.restored(raw, b.width)

    def write(self, number: int, rows: np.ndarray, x: np.ndarray) -> None:
        b = self.plan.buffers[number]
        x = np.ascontiguousarray(x, np.int32 if b.kind == KIND_I32 else np.float32).reshape(len(rows), -1)
        assert x.shape[1] == b.width
        if b.kind != KIND_Q8:
            self.raw(number)[rows] = x.view(np.uint8)
            return
        record = self.record(x)
        self.raw(number)[rows] = record
        most = len(self.raw(number))
        kept = self.exact.setdefault(number, (np.zeros((most, b.row_bytes), np.uint8), np.zeros((most, b.width))))
        kept[0][rows], kept[1][rows] = record, x

    @staticmethod
    def record(x: np.ndarray) -> np.ndarray:
        """Rows of float32 as quantised records, uint8 [rows, bytes]."""
        blocks = x.reshape(len(x), -1, 32)
        largest = np.abs(blocks).max(-1, keepdims=True)
        q = np.rint(blocks * np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0)).astype(np.int8)
        scale = largest / 127
        sums = scale * q.reshape(len(x), -1, 2, 16).sum(-1)
        record = np.zeros((len(x), quantised_row_bytes(x.shape[1])), np.uint8)
        parts = (q, scale.astype(np.float32), sums.astype(np.float32))
        packed = np.concatenate([np.ascontiguousarray(p).reshape(len(x), -1).view(np.uint8) for p in parts], 1)
        record[:, : packed.shape[1]] = packed
        return record

    @staticmethod
    def restored(raw: np.ndarray, width: int) -> np.ndarray:
        """What records stand for, float64 [rows, width]."""
        q = raw[:, :width].view(np.int8).reshape(len(raw), -1, 32).astype(np.float64)
        scale = raw[:, width : width + width // 8].copy().view(np.float32)
        return (q * scale[:, :, None]).reshape(len(raw), -1)

    def weight(self, number: int) -> np.ndarray | float:
        return 0.0 if number < 0 else self.matrices[number]

    # Stages of one operation

    def _all(self, number: int) -> np.ndarray:
        return np.arange(len(self.ids) if self.plan.buffers[number].rows == ROWS_TOKENS else len(self.rows))

    def _product(self, op: PlanOp, matrix: int, bias: int) -> np.ndarray:
        kind = self.plan.buffers[op.inputs[0]].kind
        assert (kind == KIND_Q8) == self.quantised[matrix]
        x = self.read(op.inputs[0], self._all(op.inputs[0]))
        return x @ self.matrices[matrix].T + self.weight(bias)

    def _linear(self, op: PlanOp) -> None:
        assert 1 <= op.i[0] == len(op.outputs) <= 3
        results = [self._product(op, *op.w[2 * k : 2 * k + 2]) for k in range(op.i[0])]
        for out, y in zip(op.outputs, results, strict=True):
            rows = self._all(out)
            if len(op.inputs) == 2:
                y = y + self.read(op.inputs[1], rows)
            self.write(out, rows, y)

    def _gated(self, op: PlanOp) -> None:
        y = _gate(op.i[0], op.f, self._product(op, *op.w[:2]), self._product(op, *op.w[2:]))
        self.write(op.outputs[0], self._all(op.outputs[0]), y)

    def _activated(self, op: PlanOp) -> None:
        self.write(op.outputs[0], self._all(op.outputs[0]), _FUNCTIONS[_NAMES[op.i[0]]](self._product(op, *op.w)))

    def _experts(self, op: PlanOp) -> None:
        activation, count, gated = op.i
        rows = self._all(op.inputs[0])
        x, ids, weights = (self.read(number, rows) for number in op.inputs)
        up, down = self.matrices[op.w[0]], self.matrices[op.w[2]]
        assert (self.plan.buffers[op.inputs[0]].kind == KIND_Q8) == self.quantised[op.w[0]]
        rounded = self.plan.buffers[op.outputs[1]].kind == KIND_Q8
        assert rounded == self.quantised[op.w[2]] and len(up) == len(down) == count
        # The memory for its work is not anybody else's meanwhile.
        for number in op.outputs[1:]:
            b = self.plan.buffers[number]
            self.arena[b.offset : b.offset + b.row_bytes * len(rows)] = 0xFF
        out = np.zeros((len(rows), down.shape[1]))
        for r in range(len(rows)):
            for e, weight in zip(ids[r], weights[r], strict=True):
                h = up[e] @ x[r] + (self.weight(op.w[1])[e] if op.w[1] >= 0 else 0.0)
                h = _gate(activation, op.f, *np.split(h, 2)) if gated else _FUNCTIONS[_NAMES[activation]](h)
                if rounded and self.rounds:
                    h = self.restored(self.record(h[None].astype(np.float32)), len(h))[0]
                out[r] += weight * (down[e] @ h + (self.weight(op.w[3])[e] if op.w[3] >= 0 else 0.0))
        self.write(op.outputs[0], rows, out)

    def _attend(self, op: PlanOp) -> None:
        number, heads, window = op.i
        scale, cap = op.f
        layer = self.plan.caches[number]
        g = self.layout.slot(layer)[0]
        group = self.layout.groups[g]
        cache, tokens = group.cache, group.block_tokens
        q = self.read(op.inputs[0], self._all(op.inputs[0])).reshape(-1, heads, cache.key_width)
        out = np.empty((len(q), heads, cache.value_width))
        for s in range(self.s.count):
            for t in range(self.s.query_start[s], self.s.query_start[s + 1]):
                p = self.position[t]
                seen = np.arange(max(0, p - window + 1) if window else 0, p + 1)
                blocks = self.s.block_table[g, s][seen // tokens]
                k = self.keys[number][blocks, seen % tokens].repeat(heads // cache.num_kv_heads, 1)
                v = self.values[number][blocks, seen % tokens].repeat(heads // cache.num_kv_heads, 1)
                scores = np.einsum("hd,khd->hk", q[t], k) * scale
                if cap:
                    scores = cap * np.tanh(scores / cap)
                if op.w[0] >= 0:  # a key that has no value
                    scores = np.concatenate((scores, self.matrices[op.w[0]][:, None]), 1)
                    v = np.concatenate((v, np.zeros((1, *v.shape[1:]))))
                weights = np.exp(scores - scores.max(1, keepdims=True))
                out[t] = np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), v)
        self.write(op.outputs[0], self._all(op.outputs[0]), out)

    def _attend_latent(self, op: PlanOp) -> None:
        """Keys and values of every head made of the cached rows, whatever the form."""
        number, heads, nope, value, _ = op.i
        layer = self.plan.caches[number]
        g = self.layout.slot(layer)[0]
        tokens, latent = self.layout.groups[g].block_tokens, self.plan.latents[layer]
        first, second = (self.plan.matrices[w] for w in op.w)
        assert (first.name, first.second, second.second) == (second.name, False, True)
        made = self.matrices[op.w[0]].reshape(heads, nope + value, latent)
        q = self.read(op.inputs[0], self._all(op.inputs[0])).reshape(len(self.ids), heads, -1)
        out = np.empty((len(q), heads, value))
        for s in range(self.s.count):
            for t in range(self.s.query_start[s], self.s.query_start[s + 1]):
                seen = np.arange(self.position[t] + 1)
                rows = self.keys[number][self.s.block_table[g, s][seen // tokens], seen % tokens, 0]
                k, v = np.split(np.einsum("hnr,cr->chn", made, rows[:, :latent]), [nope], axis=2)
                scores = np.einsum("hn,chn->hc", q[t, :, :nope], k) + q[t, :, nope:] @ rows[:, latent:].T
                weights = np.exp((scores - scores.max(1, keepdims=True)) * op.f[0])
                out[t] = np.einsum("hc,chv->hv", weights / weights.sum(1, keepdims=True), v)
        self.write(op.outputs[0], self._all(op.outputs[0]), out)

    def _select_rows(self, op: PlanOp) -> None:
        assert self.plan.buffers[op.outputs[0]].rows != ROWS_TOKENS
        self.write(op.outputs[0], self._all(op.outputs[0]), self.read(op.inputs[0], self.rows))

    def _logits(self, op: PlanOp) -> None:
        y = self._product(op, *op.w)
        self.logits = op.f[0] * np.tanh(y / op.f[0]) if op.f[0] else y

    # Row operations

    def _row_op(self, op: PlanOp, rows: np.ndarray) -> None:
        x = [self.read(number, rows) for number in op.inputs]
        if op.kind == "hidden":
            self.hidden[rows] = x[0]
        elif op.kind == "write_kv":
            (number,) = op.i
            layer = self.plan.caches[number]
            g = self.layout.slot(layer)[0]
            tokens = self.layout.groups[g].block_tokens
            owner = np.searchsorted(self.s.query_start, rows, side="right") - 1
            at = self.position[rows]
            where = (self.s.block_table[g, owner, at // tokens], at % tokens)
            if layer in self.plan.latents:
                assert x[0].shape[1] == self.plan.latents[layer]
                self.keys[number][where] = np.concatenate(x, 1)[:, None]
                return
            self.keys[number][where] = x[0].reshape(len(rows), *self.keys[number].shape[2:])
            self.values[number][where] = x[1].reshape(len(rows), *self.values[number].shape[2:])
        elif op.kind == "route":
            chosen = [self._choice(op, logits) for logits in x[0]]
            for k, number in enumerate(op.outputs):
                self.write(number, rows, np.array([results[k] for results in chosen]))
        else:
            self.write(op.outputs[0], rows, self._result(op, rows, x))

    def _choice(self, op: PlanOp, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One row's experts and their weights."""
        experts, top_k, kind, renormalised, groups, top_groups, flags = op.i
        softmax = lambda y: np.exp(y - y.max()) / np.exp(y - y.max()).sum()  # noqa: E731
        best = lambda y, count: np.argsort(-y, kind="stable")[:count]  # noqa: E731
        scale, jitter, least = op.f
        if kind == ROUTER_SCORES["sparse_mixer"]:
            left, ids, weights = logits.astype(float), [], []
            for _ in range(2):
                (at,) = best(left, 1)
                far = (left[at] - logits) / np.maximum(np.abs(logits), left[at]) > 2 * jitter
                ids.append(at)
                weights.append(softmax(np.where(far, -np.inf, left))[at])
                left = np.where(np.arange(experts) == at, -np.inf, left)
            return np.array(ids), np.array(weights) * scale
        scores = (softmax(logits), 1 / (1 + np.exp(-logits)), logits.copy())[kind]
        selection = scores + self.weight(op.w[0])
        if groups:
            parts = np.sort(selection.reshape(groups, -1))[:, (-2 if flags & ROUTE_TWO_BEST else -1) :].sum(1)
            out = ~np.isin(np.arange(experts) // (experts // groups), best(parts, top_groups))
            selection[out] = 0.0 if flags & ROUTE_MASKED_ZERO else -np.inf
            if flags & ROUTE_MASKED_ZERO:
                scores[out] = 0.0
        ids = best(selection, top_k)
        weights = softmax(scores[ids]) if kind == ROUTER_SCORES["topk_softmax"] else scores[ids]
        total = max(weights.sum(), least) if least else weights.sum() + 1e-20
        return ids, (weights / total if renormalised else weights) * scale

    def _result(self, op: PlanOp, rows: np.ndarray, x: list[np.ndarray]) -> np.ndarray:
        match op.kind:
            case "embed":
                number = self.position[rows] + op.i[1] if op.i[0] else self.ids[rows]
                return self.matrices[op.w[0]][number] * op.f[0]
            case "positions":
                angle = self.position[rows, None] * self.plan.tables[op.i[0] : op.i[0] + op.i[1]].astype(np.float64)
                return np.stack((np.cos(angle), np.sin(angle)), 1) * op.f[0]
            case "rms_norm":
                heads, width, offset = op.i
                y = x[0].reshape(-1, heads, width)
                y = y / np.sqrt((y**2).mean(-1, keepdims=True) + op.f[0])
                return y * (1.0 if op.w[0] < 0 else self.matrices[op.w[0]] + offset)
            case "layer_norm":
                y = x[0].reshape(-1, *op.i[:2])
                y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + op.f[0])
                return y * (1.0 if op.w[0] < 0 else self.matrices[op.w[0]]) + self.weight(op.w[1])
            case "rotate":
                heads, width, turning, adjacent, start = op.i
                y = x[0].reshape(-1, heads, width).copy()
                cos, sin = np.split(x[1][:, None], 2, -1)
                half = turning // 2
                end = start + turning
                first = slice(start, end, 2) if adjacent else slice(start, start + half)
                second = slice(start + 1, end, 2) if adjacent else slice(start + half, end)
                a, b = y[..., first].copy(), y[..., second].copy()
                y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
                return y
            case "gate":
                return _gate(op.i[0], op.f, *x)
            case "activate":
                if op.i[0] == XIELU:
                    return _xielu(x[0], *(self.matrices[w].item() for w in op.w))
                return _FUNCTIONS[_NAMES[op.i[0]]](x[0])
            case "add":
                return x[0] + x[1]
            case "scale":
                return x[0] * op.f[0]
            case "soft_cap":
                return op.f[0] * np.tanh(x[0] / op.f[0])
            case "clip":
                return x[0].clip(-op.f[0], op.f[0])
            case "quantise" | "copy":
                return x[0]
        raise AssertionError(op.kind)
