"""One step: gradients whatever the cut, skips, scaler, clipping, dropout's numbers, Sophia's pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import TrainingError
from plait.model.decoder import Decoder
from plait.model.layers import Router
from plait.training.batch import Batch
from plait.training.loss import step_loss
from plait.training.micro import cut, random_numbers, seed_of
from plait.training.precision import LossScaler, choose_precision
from plait.training.routing import StepRouting
from plait.training.step import NO_TARGETS, NOT_FINITE, OVERFLOW, TrainingStep
from tests.configs import CONFIGS
from tests.training.batches import batch_of, random_batch

FP32 = choose_precision("fp32", "cpu")
CUTS = (1, 2, 4, 7)


def make(family: str, dtype: torch.dtype = torch.float32, lr: float = 0.0, **options: Any) -> TrainingStep:
    """A step whose optimiser is plain gradient descent: the weights tell the gradients."""
    decoder = plait.from_config(CONFIGS[family] | {"initializer_range": 0.1}, seed=3, dtype=dtype).train()
    moved = [p for p in decoder.parameters() if p.requires_grad]
    return TrainingStep(decoder, torch.optim.SGD(moved, lr=lr), FP32, **{"clip": 0.0, **options})


def pieces(batch: Batch, count: int) -> list[Batch]:
    """Uneven consecutive rows, and after them one micro-batch without a target."""
    borders = sorted({round(len(batch.ids) * (i / count) ** 1.5) for i in range(count + 1)})
    parts = [batch.rows(a, b) for a, b in pairwise(borders)]
    empty = batch.rows(0, 1)
    return [*parts, Batch(empty.ids, torch.full_like(empty.targets, -100), torch.zeros_like(empty.token_mask))]


def gradients(step: TrainingStep, parts: list[Batch], number: int = 0) -> Tensor:
    step.gradients(parts, number, sum(b.target_count for b in parts))
    return torch.cat([p.grad.flatten() for p in step.decoder.parameters() if p.grad is not None]).clone()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("experts", [None, {"balance": 0.0, "z": 0.5}, {"balance": 0.5, "z": 0.5, "scope": "step"}])
def test_gradients_do_not_depend_on_the_cut(
    dtype: torch.dtype, tolerance: float, experts: dict[str, Any] | None
) -> None:
    """Cross-entropy, z-loss, and the balance loss where its shares are of the whole step."""
    step = make("llama" if experts is None else "plait_gpt", dtype)
    for module in step.decoder.modules():
        if isinstance(module, Router):  # these stay fp32 in a decoder of any dtype: here their sums are looked at
            module.weight.data = module.weight.data.to(dtype)
    if experts is not None:
        step.routing = StepRouting(step.decoder, **experts)
    batch = random_batch((15, 12), 96, seed=5, target_share=0.6)
    whole = gradients(step, [batch])
    assert float(whole.norm()) > 0
    for count in CUTS:
        parts = pieces(batch, count)
        assert len(parts) == count + 1 and len({b.target_count for b in parts}) > min(count, 4)
        assert float((gradients(step, parts) - whole).norm() / whole.norm()) < tolerance, count


def test_the_balance_loss_over_micro_batches_depends_on_the_cut() -> None:
    """What `balance_scope: step` is for."""
    step = make("plait_gpt", torch.float64)
    step.routing = StepRouting(step.decoder, balance=0.5, z=0.0, scope="micro")
    batch = random_batch((15, 12), 96, seed=5)
    whole = gradients(step, [batch])
    assert float((gradients(step, pieces(batch, 4)) - whole).norm() / whole.norm()) > 1e-4


def test_a_step_is_cut_by_tokens() -> None:
    batch = random_batch((9, 10), 96, seed=1)
    parts = cut(batch, 25)
    assert sum(len(p.ids) for p in parts) == 9 and len(parts) > 3
    assert all(p.ids.numel() <= 25 for p in parts)
    assert all(bool(p.token_mask[:, -1].any()) for p in parts)  # no column of padding alone
    assert sum(p.target_count for p in parts) == batch.target_count
    assert [len(p.ids) for p in cut(batch, 1)] == [1] * 9
    assert cut(batch, None) == [batch]


def test_a_micro_batch_without_targets_changes_nothing() -> None:
    """TRN-06: the same weights, bit for bit, as without it."""
    full = random_batch((4, 8), 96, seed=2)
    empty = Batch(full.ids, torch.full_like(full.targets, -100), full.token_mask)
    weights = []
    for parts in ([full], [empty, full], [full, empty, empty]):
        step = make("llama", lr=0.1)
        report = step(parts, 0)
        assert report.skipped is None
        weights.append(torch.cat([p.detach().flatten() for p in step.decoder.parameters()]))
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_a_step_without_targets_is_skipped_and_counted() -> None:
    full = random_batch((4, 8), 96, seed=2)
    empty = Batch(full.ids, torch.full_like(full.targets, -100), full.token_mask)
    step = make("llama", lr=0.1)
    before = {name: p.clone() for name, p in step.decoder.named_parameters()}
    report = step([empty, empty], 0)
    assert report.skipped == NO_TARGETS and report.tokens == 2 * full.tokens
    assert step.skipped[NO_TARGETS] == 1
    assert all(torch.equal(p, before[name]) for name, p in step.decoder.named_parameters())


def test_dropouts_numbers_are_a_function_of_seed_step_and_micro_batch() -> None:
    step = make("plait_gpt")
    step.decoder.model.layers[0].dropout = 0.5
    batch = random_batch((4, 8), 96, seed=2)
    torch.manual_seed(1)
    first = gradients(step, [batch, batch], 7)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(gradients(step, [batch, batch], 7), first)  # whatever the global state
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # which is left as it was
    assert not torch.equal(gradients(step, [batch, batch], 8), first)
    one, other = gradients(step, [batch], 7), gradients(step, [batch, batch], 7)
    assert not torch.allclose(one, other)  # the second micro-batch has numbers of its own
    step.seed = 1
    assert not torch.equal(gradients(step, [batch, batch], 7), first)


def test_seeds_of_keys() -> None:
    keys = [(a, b, c) for a in range(4) for b in range(40) for c in (0, 1, "labels")]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    with random_numbers("cpu", 1, 2):
        a = torch.rand(3)
    with random_numbers("cpu", 1, 2):
        assert torch.equal(torch.rand(3), a)


def test_clipping_is_by_the_global_norm() -> None:
    batch = random_batch((4, 8), 96, seed=2)
    free, clipped = make("llama", lr=1.0), make("llama", lr=1.0, clip=0.01)
    before = torch.cat([p.detach().flatten() for p in free.decoder.parameters()])
    moves = []
    for step in (free, clipped):
        report = step([batch], 0)
        moves.append(before - torch.cat([p.detach().flatten() for p in step.decoder.parameters()]))
        assert report.grad_norm == pytest.approx(float(moves[0].norm()), rel=1e-4)  # said before clipping
    assert float(moves[1].norm()) == pytest.approx(0.01, rel=1e-3)
    assert float((moves[1] / 0.01 - moves[0] / moves[0].norm()).norm()) < 1e-3  # the same direction


# The scaler


def test_the_scaler_doubles_after_good_steps_and_halves_on_overflow() -> None:
    scaler = LossScaler()
    assert scaler.scale == 2.0**15
    for _ in range(999):
        scaler.update(True)
    assert scaler.scale == 2.0**15
    scaler.update(True)
    assert scaler.scale == 2.0**16
    scaler.update(False)
    assert (scaler.scale, scaler.good_steps) == (2.0**15, 0)
    other = LossScaler()
    scaler.update(True)
    other.load_state_dict(scaler.state_dict())
    assert (other.scale, other.good_steps) == (2.0**15, 1)
    with pytest.raises(TrainingError, match="loss scale fell"):
        for _ in range(100):
            scaler.update(False)


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale() -> None:
    """TRN-05, with gradients that are infinite at step 3: unscaled, then clipped, and the next step goes on."""
    batch = random_batch((4, 8), 96, seed=2)
    step = make("llama", lr=0.1, clip=0.5)
    step.precision = choose_precision("fp16", "cpu")
    step.scaler = LossScaler()
    poisoned = False

    def poison(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf")) if poisoned else gradient

    step.decoder.model.norm.weight.register_hook(poison)  # type: ignore[union-attr]
    norms, weights = [], []
    for number in range(5):
        poisoned = number == 3
        report = step([batch], number)
        norms.append(report.grad_norm)
        assert report.skipped == (OVERFLOW if poisoned else None)
        assert report.scale == (2.0**14 if number == 4 else 2.0**15)
        weights.append(torch.cat([p.detach().flatten() for p in step.decoder.parameters()]))
        if number > 0 and not poisoned:  # gradient descent at rate 0.1 with norms clipped to 0.5
            assert float((weights[-1] - weights[-2]).norm()) <= 0.0501
    assert torch.equal(weights[3], weights[2]) and not torch.equal(weights[4], weights[3])
    exact = make("llama")
    assert norms[0] == pytest.approx(float(gradients(exact, [batch]).norm()), rel=2e-2)  # not 32,768 times that
    assert step.skipped == {NO_TARGETS: 0, NOT_FINITE: 0, OVERFLOW: 1}
    saved = step.state_dict()
    fresh = make("llama")
    fresh.scaler = LossScaler()
    fresh.load_state_dict(saved)
    assert fresh.scaler.state_dict() == step.scaler.state_dict() and fresh.skipped == step.skipped


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_gradients_are_near_fp32(name: str) -> None:
    batch = random_batch((6, 12), 96, seed=2)
    exact, half = make("qwen3"), make("qwen3")
    half.precision = choose_precision(name, "cpu")
    half.scaler = half.precision.scaler()
    wanted = gradients(exact, [batch])
    found = gradients(half, pieces(batch, 2))
    if half.scaler is not None:
        found /= half.scaler.scale
    assert all(p.dtype == torch.float32 for p in half.decoder.parameters())
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


# What is not finite


def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run_with_the_first_layer() -> None:
    batch = random_batch((4, 8), 96, seed=2)
    step = make("llama", lr=0.1, patience=3)
    assert step([batch], 0).skipped is None
    bad = step.decoder.model.layers[1].mlp.down_proj

    def spoil(module: Any, given: Any, output: Tensor) -> Tensor:
        return output * float("nan")

    handle = bad.register_forward_hook(spoil)
    before = bad.weight.clone()
    assert step([batch], 1).skipped == NOT_FINITE
    handle.remove()
    assert step([batch], 2).skipped is None  # one good step forgives
    assert not torch.equal(bad.weight, before)
    bad.register_forward_hook(spoil)
    assert [step([batch], n).skipped for n in (3, 4)] == [NOT_FINITE] * 2
    with pytest.raises(TrainingError, match=r"3 steps in a row; it began at step 3: layer 1 is the first"):
        step([batch], 5)
    assert step.skipped[NOT_FINITE] == 4


def test_where_a_gradient_or_a_parameter_went_wrong_is_named() -> None:
    batch = random_batch((4, 8), 96, seed=2)
    step = make("llama", patience=1)
    step.decoder.model.layers[1].mlp.up_proj.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(TrainingError, match=r"gradients of layer 1 .*mlp.up_proj"):
        step([batch], 0)
    step = make("llama", patience=1)
    with torch.no_grad():
        step.decoder.model.layers[2].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"parameter model.layers.2.mlp.up_proj.weight is not finite"):
        step([batch], 0)


# Experts and Sophia


def test_the_optimiser_is_told_which_experts_were_active() -> None:
    """Two tokens and top-2: at most four of the five experts of a layer see a token."""
    step = make("plait_gpt", lr=0.1)
    step.routing = StepRouting(step.decoder, balance=0.01, z=0.001)
    told: list[Tensor | None] = []

    def before(optimizer: Any, *_: Any) -> None:
        told.extend(getattr(layer.mlp.experts.down_proj, "active_experts", None) for layer in step.decoder.model.layers)

    step.optimizer.register_step_pre_hook(before)
    report = step([batch_of([[5, 6]], 96)], 0)
    assert report.routing["0"]["dropped"] == 0
    for layer, mask in enumerate(told):
        assert mask is not None
        load = torch.tensor(report.routing[str(layer)]["load"])
        assert torch.equal(mask, load > 0) and not bool(mask.all())


class SpySophia(torch.optim.SGD):
    """What Sophia's optimiser must be given (TRN-12)."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.parameters(), lr=0.0)
        self.refreshes: list[tuple[int, Tensor]] = []
        self.asked: list[int] = []

    def wants_hessian(self, step: int) -> bool:
        self.asked.append(step)
        return step % 10 == 0

    def update_hessian(self, positions: int) -> bool:
        grads = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.refreshes.append((positions, torch.cat(grads).clone()))
        return True


def test_sophias_pass_has_labels_of_the_models_own_and_leaves_no_gradient() -> None:
    """k = 10, accumulation of two: one refresh in ten steps, with the positions of the whole step, its gradients
    neither clipped nor those of the data's labels, and none of them left for the next step."""
    decoder = plait.from_config(CONFIGS["llama"], seed=3).train()
    spy = SpySophia(decoder)
    step = TrainingStep(decoder, spy, FP32, clip=1e-3)
    a, b = random_batch((3, 8), 96, seed=1, target_share=0.5), random_batch((2, 8), 96, seed=2, target_share=0.5)
    for number in range(20):
        report = step([a, b], number)
        assert report.curvature == (number in (9, 19))
        assert all(p.grad is None for p in decoder.parameters())
    assert spy.asked == list(range(1, 21)) and len(spy.refreshes) == 2
    (count, first), (_, second) = spy.refreshes
    assert count == a.target_count + b.target_count
    assert float(first.norm()) > 1e-2  # clip = 1e-3 did not touch it
    assert not torch.equal(first, second)  # drawn anew

    # The definition: labels drawn with the step's own numbers, mean over all drawn positions.
    total = torch.zeros(())
    for micro, batch in enumerate((a, b)):
        labels = torch.Generator().manual_seed(seed_of(0, 9, micro, "labels"))
        total = total + step_loss(decoder, batch, valid=count, labels=labels).total
    decoder.zero_grad()
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])
    assert float((first - wanted).norm() / wanted.norm()) < 1e-5
    data = gradients(step, [a, b])
    assert float((first - data).norm() / data.norm()) > 0.1
