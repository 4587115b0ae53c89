"""Latent attention: both forms, in every memory, against float64 loops; the rule that chooses between them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.memory.dense import DenseMemory
from plait.memory.layout import make_layout
from plait.memory.none import NoMemory
from plait.memory.paged import PagedMemory
from plait.ops.latent import expands
from plait.ops.reference import rotate
from plait.ops.spec import LatentForm, LatentSpec, LayerCache
from plait.ops.step import Sequences, StepInputs

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS: tuple[LatentForm, ...] = ("auto", "expanded", "absorbed")
SPEC = LatentSpec(num_heads=3, latent_width=7, nope_width=5, rope_width=4, value_width=6, scale=0.31)
# One query expands over up to 3 keys and absorbs from 4 on: decoding sequences of one step differ.
BOTH = LatentSpec(num_heads=2, latent_width=4, nope_width=1, rope_width=2, value_width=1, scale=0.9)
LITE = LatentSpec(num_heads=16, latent_width=512, nope_width=128, rope_width=64, value_width=128, scale=1.0)


class Tokens:
    """Random operands of N tokens and a weight."""

    def __init__(self, spec: LatentSpec, *leading: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.spec = spec
        self.weight = random(spec.num_heads * (spec.nope_width + spec.value_width), spec.latent_width)
        self.q = random(*leading, spec.num_heads, spec.key_width)
        self.latent = random(*leading, spec.latent_width)
        self.k_rope = random(*leading, 1, spec.rope_width)

    def attend(self, step, rows: slice | Tensor | tuple = ..., spec: LatentSpec | None = None) -> Tensor:
        operands = (self.q[rows], self.latent[rows], self.k_rope[rows])
        return step.attend_latent(0, *operands, self.weight, spec or self.spec)

    def truth(self, rows: slice | tuple = ...) -> np.ndarray:
        """Causal attention of the tokens of one sequence, one query, head and key after the other, in float64."""
        s = self.spec
        q, c, k = (x[rows].double().numpy() for x in (self.q, self.latent, self.k_rope))
        w = self.weight.double().numpy().reshape(s.num_heads, s.nope_width + s.value_width, s.latent_width)
        out = np.zeros((len(q), s.num_heads, s.value_width))
        for n, h in product(range(len(q)), range(s.num_heads)):
            keys = [np.concatenate((w[h, : s.nope_width] @ c[j], k[j, 0])) for j in range(n + 1)]
            scores = np.array([s.scale * (q[n, h] @ key) for key in keys])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[n, h] = sum(p * (w[h, s.nope_width :] @ c[j]) for j, p in enumerate(weights))
        return out


def close(found: Tensor, truth: np.ndarray, tolerance: float = 2e-6) -> bool:
    assert found.shape == truth.shape
    return bool(np.abs(found.double().numpy() - truth).max() <= tolerance * max(1.0, np.abs(truth).max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 13])
def test_without_memory(form: LatentForm, length: int):
    tokens = Tokens(SPEC, length)
    found = tokens.attend(NoMemory().begin(torch.zeros(length), None), spec=replace(SPEC, form=form))
    assert close(found, tokens.truth())


@pytest.mark.parametrize("form", FORMS)
def test_padding_and_segments(form: LatentForm):
    """A left-padded row, and packed documents, give what each gives alone; a row of padding stays finite."""
    spec = replace(SPEC, form=form)
    tokens, mask = Tokens(spec, 2, 9, seed=1), torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    padded = tokens.attend(NoMemory().begin(torch.zeros(2, 9), StepInputs(token_mask=mask)))
    assert close(padded[0, 4:], tokens.truth((0, slice(4, 9)))) and close(padded[1], tokens.truth((1, ...)))
    assert torch.isfinite(padded).all()
    segments = torch.tensor([[0] * 3 + [1] * 6, [0] * 8 + [1]])
    packed = tokens.attend(NoMemory().begin(torch.zeros(2, 9), StepInputs(segment_ids=segments)))
    for row, part in ((0, slice(0, 3)), (0, slice(3, 9)), (1, slice(0, 8)), (1, slice(8, 9))):
        assert close(packed[row, part], tokens.truth((row, part)))


@pytest.mark.parametrize("form", FORMS)
def test_dense_memory_keeps_rows_and_no_values(form: LatentForm):
    spec = replace(SPEC, form=form)
    tokens = Tokens(spec, 2, 11, seed=2)
    memory = DenseMemory([LayerCache(1, spec.row_width, 0)], 2, capacity=4)
    found = []
    for a, b in ((0, 5), (5, 6), (6, 11)):
        part = (slice(None), slice(a, b))
        found.append(tokens.attend(memory.begin(torch.zeros(2, b - a), None), part))
    for row in range(2):
        assert close(torch.cat(found, 1)[row], tokens.truth((row, ...)))
    assert sum(t.numel() for t in memory._values) == 0
    memory.reorder(torch.tensor([1, 1]))
    assert torch.equal(memory._keys[0][0, 0, :11], torch.cat((tokens.latent[1], tokens.k_rope[1, :, 0]), -1))


class Paged:
    """A pool of blocks of four tokens full of NaN, and sequences with scattered blocks of their own."""

    def __init__(self, spec: LatentSpec, sequences: int, dtype: torch.dtype = torch.float32) -> None:
        layout = make_layout([LayerCache(1, spec.row_width, 0)], dtype.itemsize, 64, 64, block_tokens=4)
        order = np.random.default_rng(3).permutation(8 * sequences) + 1
        self.table = order.reshape(1, sequences, 8).astype(np.int32)
        self.memory = PagedMemory(layout, order.size + 1, dtype)
        self.memory.views[0][1][1:] = torch.nan

    def begin(self, parts: list[tuple[int, int, int]]):
        """parts: (sequence, first token, token after the last) of the step."""
        which, starts, ends = zip(*parts, strict=True)
        bounds = np.cumsum([0, *(b - a for a, b in zip(starts, ends, strict=True))]).astype(np.int32)
        sequences = Sequences(bounds, np.array(ends, np.int32), self.table[:, list(which)])
        return self.memory.begin(torch.zeros(int(bounds[-1]), dtype=torch.long), StepInputs(sequences=sequences))


# Prompts, single tokens and chunks of three sequences, mixed; the second half decodes at unlike lengths.
STEPS = (
    [(0, 0, 1)],
    [(0, 1, 2), (1, 0, 9)],
    [(1, 9, 10), (2, 0, 3)],
    [(0, 2, 3), (1, 10, 16), (2, 3, 4)],
    [(0, 3, 4), (1, 16, 17), (2, 4, 5)],
    [(0, 4, 5), (2, 5, 6), (1, 17, 18)],
    [(1, 18, 19)],
)


@pytest.mark.parametrize("spec", [SPEC, BOTH], ids=["wide", "both forms in one step"])
@pytest.mark.parametrize("form", FORMS)
def test_paged_memory(form: LatentForm, spec: LatentSpec):
    spec = replace(spec, form=form)
    tokens = [Tokens(spec, 20, seed=s) for s in range(3)]
    for other in tokens[1:]:
        other.weight = tokens[0].weight
    paged = Paged(spec, 3)
    found: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    for parts in STEPS:
        step = paged.begin(parts)
        operands = (
            torch.cat([getattr(tokens[s], name)[a:b] for s, a, b in parts]) for name in ("q", "latent", "k_rope")
        )
        out = step.attend_latent(0, *operands, tokens[0].weight, spec)
        for which, part in zip(parts, out.split([b - a for _, a, b in parts]), strict=True):
            found[which[0]].append(part)
    for s, parts in found.items():
        assert close(torch.cat(parts), tokens[s].truth(slice(0, len(torch.cat(parts)))))
    assert not any(paged.memory.read_block(0)), "the null block stays empty"


def test_the_forms_of_one_decoding_step_differ_where_their_costs_do():
    assert [expands(1, context, BOTH) for context in (1, 2, 3, 4, 5, 17)] == [True, True, True, False, False, False]


def test_a_pool_holds_one_row_per_token_and_nothing_beside_it():
    layout = make_layout([LayerCache(1, 576, 0)] * 61, 2, 4096, 512)
    assert layout.block_bytes * len(layout.groups) == 61 * 576 * 2 * layout.groups[0].block_tokens
    paged = Paged(SPEC, 1)
    _, rows, values = paged.memory.views[0]
    assert rows.shape[1:] == (4, 11) and values.numel() == 0
    assert len(paged.memory.read_block(1)) == 4 * 11 * 4


def test_a_narrower_pool_is_read_as_rounded_in_the_step_that_writes_it():
    """A prompt in one step, and in two, of the same rounded rows."""
    tokens = Tokens(SPEC, 9, seed=5)
    whole = tokens.attend(Paged(SPEC, 1, torch.bfloat16).begin([(0, 0, 9)]))
    split = Paged(SPEC, 1, torch.bfloat16)
    parts = [tokens.attend(split.begin([(0, a, b)]), slice(a, b)) for a, b in ((0, 6), (6, 9))]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-5)
    tokens.latent, tokens.k_rope = tokens.latent.bfloat16().float(), tokens.k_rope.bfloat16().float()
    assert close(whole, tokens.truth(), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_finite_differences(form: LatentForm):
    spec = LatentSpec(2, 3, 2, 2, 3, 0.7, form)
    tokens = Tokens(spec, 4, seed=4, dtype=torch.float64)
    operands = [x.requires_grad_() for x in (tokens.q, tokens.latent, tokens.k_rope, tokens.weight)]

    def forward(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        step = NoMemory().begin(torch.zeros(4), None)
        return step.attend_latent(0, q, latent, k_rope, weight, spec)

    assert torch.autograd.gradcheck(forward, operands)


def test_dropout_reaches_the_weights_of_both_forms():
    for form in ("expanded", "absorbed"):
        spec = replace(SPEC, form=form)
        tokens = Tokens(spec, 7)
        torch.manual_seed(0)
        dropped = tokens.attend(NoMemory(dropout=0.5).begin(torch.zeros(7), None))
        assert (dropped - tokens.attend(NoMemory().begin(torch.zeros(7), None))).abs().max() > 0.1


def multiply_adds(queries: int, context: int, s: LatentSpec, expanded: bool) -> tuple[int, int]:
    """(in products with the weight, in attention) of one head, counted matrix by matrix."""
    if expanded:
        made = context * s.nope_width * s.latent_width + context * s.value_width * s.latent_width
        return made, queries * context * (s.nope_width + s.rope_width) + queries * context * s.value_width
    moved = queries * s.nope_width * s.latent_width + queries * s.value_width * s.latent_width
    return moved, queries * context * (s.latent_width + s.rope_width) + queries * context * s.latent_width


@pytest.mark.parametrize("spec", [SPEC, BOTH, LITE], ids=["small", "both", "lite"])
@pytest.mark.parametrize("attend_cost", [0.25, 1.0, 3.0])
def test_the_rule_takes_the_form_with_the_smaller_count(spec: LatentSpec, attend_cost: float):
    for queries, more in product((1, 2, 7, 64, 500), (0, 1, 5, 100, 4000)):
        context = queries + more
        costs = [a + attend_cost * b for a, b in (multiply_adds(queries, context, spec, e) for e in (True, False))]
        assert expands(queries, context, spec, attend_cost) == (costs[0] < costs[1])


def test_the_rule_decodes_absorbed_and_prefills_expanded():
    assert expands(512, 512, LITE) and expands(2000, 8000, LITE)
    assert not expands(1, 1000, LITE) and not expands(16, 30_000, LITE)
    for queries, context in ((1, 9000), (512, 512)):
        assert expands(queries, context, replace(LITE, form="expanded"))
        assert not expands(queries, context, replace(LITE, form="absorbed"))


@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_rotation_from_a_feature_on_leaves_the_others_alone(pairing: str):
    x, angles = torch.randn(5, 3, 11), torch.randn(5, 2, 2)
    turned = rotate(x, angles, width=4, pairing=pairing, start=5)
    assert torch.equal(turned[..., :5], x[..., :5]) and torch.equal(turned[..., 9:], x[..., 9:])
    assert torch.equal(turned[..., 5:9], rotate(x[..., 5:9], angles, width=4, pairing=pairing))
    assert torch.equal(
        rotate(x, angles, width=4, pairing=pairing), rotate(x, angles, width=4, pairing=pairing, start=0)
    )
