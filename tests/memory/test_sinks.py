"""Attention sinks: a logit of each head in the sum of its softmax, with every memory, against float64 by definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.memory.dense import DenseMemory
from plait.memory.layout import make_layout
from plait.memory.none import NoMemory
from plait.memory.paged import PagedMemory
from plait.model.decoder import from_config
from plait.model.record import record
from plait.ops.spec import AttendSpec, LayerCache
from plait.ops.step import Sequences, StepInputs
from plait.ops.trace import trace
from tests.configs import CONFIGS

HEADS, KV_HEADS, KEY, VALUE, TOKENS = 6, 2, 8, 5, 23


def operands(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, KEY), (KV_HEADS, KEY), (KV_HEADS, VALUE))
    q, k, v = (torch.randn(TOKENS, *shape, generator=generator) for shape in shapes)
    return q, k, v, torch.randn(HEADS, generator=generator)


def by_definition(q, k, v, sinks, spec: AttendSpec) -> torch.Tensor:
    """Number by number, in the dtype of the operands."""
    out = torch.zeros(TOKENS, HEADS, VALUE, dtype=q.dtype)
    for t in range(TOKENS):
        for h in range(HEADS):
            first = max(0, t - spec.window + 1) if spec.window else 0
            keys, values = (x[first : t + 1, h // (HEADS // KV_HEADS)] for x in (k, v))
            scores = keys @ q[t, h] * spec.scale
            if spec.soft_cap:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            shares = scores.exp()
            out[t, h] = (shares / (shares.sum() + sinks[h].exp())) @ values
    return out


def none(q, k, v, sinks, spec: AttendSpec) -> torch.Tensor:
    ids = torch.zeros(TOKENS, dtype=torch.long)
    return NoMemory().begin(ids, None).attend(0, q, k, v, spec, sinks)


def dense(q, k, v, sinks, spec: AttendSpec) -> torch.Tensor:
    """In three steps, the second of a single token."""
    memory = DenseMemory([cache(spec)], 1, dtype=q.dtype, capacity=4)
    parts = []
    for a, b in ((0, 9), (9, 10), (10, TOKENS)):
        step = memory.begin(torch.zeros(1, b - a, dtype=torch.long), None)
        parts.append(step.attend(0, q[None, a:b], k[None, a:b], v[None, a:b], spec, sinks)[0])
    return torch.cat(parts)


def paged(q, k, v, sinks, spec: AttendSpec) -> torch.Tensor:
    """Two sequences of the same tokens, one a step ahead: prefills and decodes in one step, then decodes alone."""
    layout = make_layout([cache(spec)], 4, TOKENS, TOKENS, block_tokens=4)
    memory = PagedMemory(layout, 13)
    table = np.arange(1, 13, dtype=np.int32).reshape(1, 2, 6)
    parts: list[list[torch.Tensor]] = [[], []]
    for spans in (((0, 9), None), ((9, 10), (0, 9)), ((10, 11), (9, 10)), ((11, TOKENS), (10, TOKENS))):
        used = [i for i, span in enumerate(spans) if span]
        bounds = [spans[i] for i in used]
        rows = torch.cat([torch.arange(a, b) for a, b in bounds])
        start = np.concatenate(([0], np.cumsum([b - a for a, b in bounds]))).astype(np.int32)
        context = np.array([b for _, b in bounds], np.int32)
        sequences = Sequences(start, context, np.ascontiguousarray(table[:, used]))
        step = memory.begin(torch.zeros(len(rows), dtype=torch.long), StepInputs(sequences=sequences))
        out = step.attend(0, q[rows], k[rows], v[rows], spec, sinks)
        for i, part in zip(used, out.split(np.diff(start).tolist()), strict=True):
            parts[i].append(part)
    first, second = (torch.cat(p) for p in parts)
    assert torch.allclose(first, second, atol=1e-6)
    return first


def cache(spec: AttendSpec) -> LayerCache:
    return LayerCache(KV_HEADS, KEY, VALUE, spec.window)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("soft_cap", [0.0, 0.9])
@pytest.mark.parametrize("memory", [none, dense, paged], ids=lambda f: f.__name__)
def test_every_memory_gives_what_the_definition_says(memory, soft_cap: float, window: int):
    spec = AttendSpec(HEADS, KV_HEADS, KEY, VALUE, 0.4, window, soft_cap)
    given = operands()
    expected = by_definition(*(x.double() for x in given), spec)
    assert (memory(*given, spec) - expected).abs().max() <= 2e-6
    without = by_definition(*(x.double() for x in given[:3]), torch.full((HEADS,), -torch.inf).double(), spec)
    assert (expected - without).abs().max() > 0.1


@pytest.mark.parametrize("soft_cap", [0.0, 0.9])
def test_gradients_of_the_operands_and_of_the_sinks(soft_cap: float):
    spec = AttendSpec(HEADS, KV_HEADS, KEY, VALUE, 0.4, 5, soft_cap)
    weight = torch.randn(TOKENS, HEADS, VALUE, generator=torch.Generator().manual_seed(1)).double()
    ours, theirs = ([x.double().requires_grad_() for x in operands()] for _ in range(2))
    (none(*ours, spec) * weight).sum().backward()
    (by_definition(*theirs, spec) * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        # Scores are computed in fp32, whatever the operands are.
        assert (a.grad - b.grad).norm() <= 1e-5 * b.grad.norm()


def test_a_recording_names_the_sinks_and_a_trace_counts_them():
    decoder = from_config(CONFIGS["gpt_oss"], seed=1)
    recording = record(decoder)
    attends = [op for op in recording.ops if op.name == "attend"]
    names = [ref.name for op in attends for ref in op.weights]
    assert names == [f"model.layers.{i}.self_attn.sinks" for i in range(3)]
    ids = torch.arange(7)
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    largest = []
    for sink in (-30.0, 30.0):
        changed = {name: torch.full_like(w, sink) if name.endswith("sinks") else w for name, w in weights.items()}
        rows = trace(recording, changed, ids, NoMemory().begin(ids, None))["operations"]
        largest.append(next(row["attention"][0][2] for row in rows if row["op"] == "attend"))
    assert largest[0] > 0.1 and largest[1] < 1e-6
    assert all(not op.weights for op in record(from_config(CONFIGS["llama"])).ops if op.name == "attend")
