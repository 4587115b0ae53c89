"""What a step over several micro-batches is told of its routers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import UsageError
from plait.model.decoder import Decoder, Trace
from plait.ops.step import StepInputs
from plait.training.mixture import balance_loss, routing_sums, z_loss
from plait.training.routing import StepRouting
from tests.configs import CONFIGS

pytestmark = pytest.mark.usefixtures("one_thread")

RAW = {**CONFIGS["plait_gpt"], "selection_bias": True}


def batches(cut: tuple[int, ...]) -> list[Any]:
    """Six rows of different lengths, cut into micro-batches of whole rows."""
    ids = torch.randint(2, 96, (6, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(9) < torch.tensor([9, 4, 7, 1, 9, 2])[:, None]
    return [SimpleNamespace(ids=i, token_mask=m) for i, m in zip(ids.split(cut), mask.split(cut), strict=True)]


def traced(decoder: Decoder, batch: Any) -> Trace:
    trace = Trace(router=True)
    decoder(batch.ids, StepInputs(token_mask=batch.token_mask), trace=trace)
    return trace


def step(decoder: Decoder, routing: StepRouting, cut: tuple[int, ...]) -> float:
    """The auxiliary losses of a step, with their gradients."""
    micro = batches(cut)
    routing.begin(sum(int(b.token_mask.sum()) for b in micro))
    if routing.needs_counts():
        with torch.no_grad():
            for batch in micro:
                routing.count(traced(decoder, batch), batch)
    total = 0.0
    for batch in micro:
        part = routing.loss(traced(decoder, batch), batch)
        part.backward()
        total += part.item()
    return total


def gates(decoder: Decoder) -> list[Tensor]:
    found = [layer.mlp.gate.weight.grad.clone() for layer in decoder.model.layers]
    decoder.zero_grad()
    return found


def test_scope_step_does_not_depend_on_the_cut_and_scope_micro_does() -> None:
    decoder = plait.from_config(RAW, seed=1)
    (all_rows,) = batches((6,))
    sums = routing_sums(traced(decoder, all_rows).routing, all_rows.token_mask)
    assert sums.tokens == 32
    expected = 0.5 * balance_loss(sums, 32) + 0.25 * z_loss(sums, 32)
    expected.backward()
    gradients = gates(decoder)
    whole = StepRouting(decoder, balance=0.5, z=0.25, scope="step")
    for cut in ((6,), (2, 4), (1, 1, 1, 1, 1, 1)):
        assert step(decoder, whole, cut) == pytest.approx(expected.item(), rel=1e-5)
        for a, b in zip(gates(decoder), gradients, strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().item())
    micro = StepRouting(decoder, balance=0.5, z=0.25, scope="micro")
    assert not micro.needs_counts()
    assert step(decoder, micro, (6,)) == pytest.approx(expected.item(), rel=1e-5)
    assert step(decoder, micro, (1,) * 6) > 1.05 * expected.item()


def test_the_figures_and_marks_are_those_of_all_micro_batches() -> None:
    decoder = plait.from_config({**RAW, "n_experts": 8, "top_k": 1}, seed=1)
    (all_rows,) = batches((6,))
    with torch.no_grad():
        sums = routing_sums(traced(decoder, all_rows).routing, all_rows.token_mask)
    routing = StepRouting(decoder, balance=0.5, z=0.25)
    step(decoder, routing, (1, 2, 3))
    routing.mark_active()
    figures = routing.finish(updated=True)
    assert figures["balance_loss"] == pytest.approx(balance_loss(sums, 32).item(), rel=1e-5)
    assert figures["z_loss"] == pytest.approx(z_loss(sums, 32).item(), rel=1e-5)
    for row, (i, layer) in zip(sums.slots, enumerate(decoder.model.layers), strict=True):
        assert figures[str(i)]["load"] == pytest.approx((row / 32).tolist()) and figures[str(i)]["dropped"] == 0
        active = layer.mlp.experts.down_proj.active_experts
        assert row.bool().all() if active is None else torch.equal(active, row > 0)


def test_selection_biases_move_once_per_step_and_not_where_the_weights_did_not() -> None:
    decoder = plait.from_config(RAW, seed=1)
    routing = StepRouting(decoder, balance=0.0, z=0.0, bias_update=0.125)
    bias = decoder.model.layers[0].mlp.gate.e_score_correction_bias
    step(decoder, routing, (1, 2, 3))
    routing.finish(updated=False)
    assert not bias.any()
    step(decoder, routing, (1, 2, 3))
    routing.finish(updated=True)
    assert bias.abs().max() == 0.125 and bias.min() < 0 < bias.max()


def test_an_update_of_biases_that_are_not_there_is_refused() -> None:
    decoder = plait.from_config(CONFIGS["plait_gpt"])
    with pytest.raises(UsageError, match=r"bias_update=0.001: this plait_gpt has no selection bias"):
        StepRouting(decoder, balance=0.01, z=0.0, bias_update=0.001)
