"""A plan of one latent attention, and what it means in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from plait.kernels import abi
from plait.ops.latent import expands
from plait.ops.spec import LatentSpec
from tests.kernels import quant_model
from tests.kernels.quant_model import Records
from tests.kernels.toy_plan import Builder, Plan, Steps, functions

FORMS = ("expanded", "absorbed")
VOCABULARY = 8


@dataclass(frozen=True)
class Shape:
    """Of one layer, and how its numbers are kept. second: layout of the transposed rows."""

    heads: int
    latent: int
    nope: int
    rope: int
    value: int
    weight: str = "F32"
    kv: str = "fp32"
    block: int = 16

    @property
    def key(self) -> int:
        return self.nope + self.rope

    @property
    def row(self) -> int:
        return self.latent + self.rope

    @property
    def second(self) -> str:
        return self.weight if self.weight in abi.FLOAT_LAYOUTS else "BF16"

    @property
    def quantised(self) -> bool:
        return self.weight not in abi.FLOAT_LAYOUTS


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(kind).float().numpy()


class Layer:
    """A plan of WRITE_KV and ATTEND_LATENT; the test writes operands and cache where they lie.

    contexts: of the sequences, whose earlier rows are in the cache from the beginning. Memory that nobody wrote is NaN.
    """

    def __init__(self, shape: Shape, contexts: list[int], form: str = "auto", cost: float = 1.0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.shape = s = shape
        self.most = 160
        b = self.builder = Builder(self.most, 1, VOCABULARY)
        w = b.matrix(rng, s.heads * (s.nope + s.value), s.latent, s.weight, s.latent**-0.5)
        self.weight = b.values[w].astype(np.float64).reshape(s.heads, s.nope + s.value, s.latent)
        turned = np.ascontiguousarray(self.weight[:, : s.nope].transpose(0, 2, 1).reshape(-1, s.nope), np.float32)
        packed = quant_model.pack(turned, "F32", s.second, s.nope)
        b.keep.append(packed)
        b.matrices.append(packed.matrix)
        self.turned = quant_model.unpack(packed).astype(np.float64).reshape(s.heads, s.latent, s.nope)
        # Every sequence has blocks of its own, in any order; block 0 is nobody's.
        per = max(-(-n // s.block) for n in contexts)
        self.table = (1 + rng.permutation(len(contexts) * per)).astype(np.int32).reshape(len(contexts), per)
        size = 4 if s.kv == "fp32" else 2
        self.stride = s.block * s.row * size
        self.pool = quant_model.aligned((self.table.size + 1) * self.stride)
        self.pool[:] = 0xFF  # NaN in every type
        self.cache = abi.Cache(
            base=self.pool.ctypes.data,
            block_stride=self.stride,
            block_tokens=s.block,
            num_kv_heads=1,
            key_width=s.row,
            kv_type=abi.KV_TYPES[s.kv],
            latent_width=s.latent,
        )
        b.caches.append(self.cache)
        self.rows = [rng.standard_normal((n, s.row)).astype(np.float32) for n in contexts]
        self.q = [rng.standard_normal((n, s.heads, s.key)).astype(np.float32) for n in contexts]
        # Scores of a deviation of about 1.5, so that neither one key nor all of them decide.
        spread = np.sqrt(1.0 * s.rope + s.latent * (self.weight[:, : s.nope] ** 2).sum((1, 2)).mean() / s.latent)
        self.scale = float(np.float32(1.5 / spread))
        self.in_q, self.in_latent = b.buffer(s.heads * s.key), b.buffer(s.latent)
        self.in_rope = b.buffer(s.rope) if s.rope else -1
        self.out = b.buffer(s.heads * s.value)
        b.op("write_kv", [self.in_latent, self.in_rope])
        i = (0, s.heads, s.nope, s.value, abi.LATENT_FORMS[form])
        b.op("attend_latent", self.in_q, self.out, [w, w + 1], i, (self.scale, cost))
        self.form, self.cost = form, cost
        self.plan: Plan = b.create()

    @property
    def spec(self) -> LatentSpec:
        s = self.shape
        return LatentSpec(s.heads, s.latent, s.nope, s.rope, s.value, self.scale, self.form)

    def write(self, buffer: int, values: np.ndarray) -> None:
        if buffer < 0 or not len(values):
            return
        found = self.builder.buffers[buffer]
        address = functions().plait_plan_buffer(self.plan.handle, buffer)
        memory = np.frombuffer((ctypes.c_uint8 * (len(values) * found.row_bytes)).from_address(address), np.uint8)
        bits = np.ascontiguousarray(values, np.float32).reshape(len(values), -1).view(np.uint8)
        memory.reshape(len(values), -1)[:, : bits.shape[1]] = bits

    def run(self, parts: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """parts: (sequence, first token of the step, tokens). -> float32 [tokens, heads, value] of each part."""
        s = self.shape
        start = [0, *np.cumsum([n for _, _, n in parts]).tolist()]
        for sequence, first, _ in parts:
            if first:
                table = self.table[sequence]
                rows = np.ascontiguousarray(self.rows[sequence][:first])
                status = functions().plait_write_kv(
                    None, ctypes.byref(self.cache), table.ctypes.data, 0, first, rows.ctypes.data, None
                )
                assert status == 0
        take = lambda arrays: np.concatenate([arrays[i][a : a + n] for i, a, n in parts])  # noqa: E731
        rows = take(self.rows)
        self.write(self.in_q, take(self.q))
        self.write(self.in_latent, rows[:, : s.latent])
        self.write(self.in_rope, rows[:, s.latent :])
        table = self.table[[i for i, _, _ in parts]][None]
        step = Steps([0] * start[-1], start, [a + n for _, a, n in parts], table, [], VOCABULARY, 1, want_logits=False)
        self.plan.run(step)
        out = self.plan.rows(self.out, start[-1]).copy().reshape(-1, s.heads, s.value)
        return [out[a:b] for a, b in pairwise(start)]

    def expected(self, part: tuple[int, int, int], form: str) -> tuple[np.ndarray, np.ndarray]:
        """The result in float64, and what a rounding of the absorbed form's results to 8 bits may add to it."""
        s, (sequence, first, tokens) = self.shape, part
        context = first + tokens
        cached = rounded(self.rows[sequence][:context], s.kv).astype(np.float64)
        latent, rope = cached[:, : s.latent], cached[:, s.latent :]
        q = self.q[sequence][first:context].astype(np.float64)
        nope = q[..., : s.nope]
        bf16_dot = functions().plait_isa() == b"avx512_bf16"  # products with bf16 round what they multiply
        if form == "expanded":
            given = latent
            if s.quantised:
                given = records(latent)
            elif s.weight == "BF16" and bf16_dot:
                given = rounded(latent, "bf16").astype(np.float64)
            keys = np.einsum("hnr,cr->chn", self.weight[:, : s.nope], given, optimize=True)
            scores = np.einsum("thn,chn->thc", nope, keys, optimize=True)
        else:
            if s.second == "BF16" and bf16_dot:
                nope = rounded(nope, "bf16").astype(np.float64)
            query = np.einsum("hrn,thn->thr", self.turned, nope, optimize=True)
            scores = np.einsum("thr,cr->thc", query, latent, optimize=True)
        scores = (scores + np.einsum("thp,cp->thc", q[..., s.nope :], rope, optimize=True)) * self.scale
        seen = np.arange(first, context)[:, None] >= np.arange(context)
        scores = np.where(seen[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        up = self.weight[:, s.nope :]
        if form == "expanded":
            values = np.einsum("hvr,cr->chv", up, given, optimize=True)
            out = np.einsum("thc,chv->thv", weights, values, optimize=True)
            return out, np.zeros_like(out)
        mixed = np.einsum("thc,cr->thr", weights, latent, optimize=True)
        off = np.zeros_like(mixed)
        if s.quantised:
            largest = np.abs(mixed.reshape(tokens, s.heads, -1, 32)).max(-1)
            off = np.repeat(largest / 127 * 0.51, 32, -1)
        elif s.weight == "BF16" and bf16_dot:
            off = np.abs(mixed) * 2.0**-8
        return (
            np.einsum("hvr,thr->thv", up, mixed, optimize=True),
            np.einsum("hvr,thr->thv", np.abs(up), off, optimize=True),
        )

    def check(self, parts: list[tuple[int, int, int]]) -> None:
        results = self.run(parts)
        # A value of a head has this deviation; errors of float32 chains grow with their length.
        size = float(np.sqrt((self.weight[:, self.shape.nope :] ** 2).sum(-1).mean()))
        for part, got in zip(parts, results, strict=True):
            form = self.form
            if form == "auto":
                form = FORMS[0] if expands(part[2], part[1] + part[2], self.spec, self.cost) else FORMS[1]
            want, off = self.expected(part, form)
            far = np.abs(got - want) - off
            assert far.max() < 2e-5 * size, f"{form} {part}: {far.max() / size} of a value's deviation"


def records(x: np.ndarray) -> np.ndarray:
    """x [rows, cols] as the kernels quantise it, float64."""
    rows, cols = x.shape
    given = np.ascontiguousarray(x, np.float32)
    data = np.zeros((rows, functions().plait_quantised_row_bytes(cols)), np.uint8)
    assert functions().plait_quantise(None, given.ctypes.data, cols, rows, cols, data.ctypes.data) == 0
    return Records(data, cols).values()
