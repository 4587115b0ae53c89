"""What a forward tells of its routers, and that padding is routed nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.model.decoder import Decoder, Trace
from plait.model.record import record
from plait.ops.reference import by_expert, experts
from plait.ops.step import StepInputs
from tests.configs import CONFIGS

pytestmark = pytest.mark.usefixtures("one_thread")

# Softmax, plain experts, a shared one; sigmoid scores by groups; a softmax over the chosen; a dense layer among others.
FAMILIES = ("plait_gpt", "deepseek_v3", "gpt_oss", "qwen3_moe")


def decoder_of(family: str, **changes: Any) -> Decoder:
    return plait.from_config({**CONFIGS[family], **changes}, seed=7)


def some_ids(rows: int, length: int) -> Tensor:
    return torch.randint(2, 96, (rows, length), generator=torch.Generator().manual_seed(length))


def mixtures(decoder: Decoder) -> dict[int, Any]:
    return {i: layer.mlp for i, layer in enumerate(decoder.model.layers) if hasattr(layer.mlp, "gate")}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_has_what_every_router_decided(family: str) -> None:
    decoder, ids = decoder_of(family), some_ids(2, 9)
    seen: dict[int, Any] = {}
    for index, mixture in mixtures(decoder).items():
        mixture.gate.register_forward_hook(lambda _, __, out, index=index: seen.__setitem__(index, out))
    trace = Trace(router=True)
    with torch.no_grad():
        decoder(ids, trace=trace)
    assert trace.routing.keys() == seen.keys() and len(seen) == (2 if family in ("deepseek_v3", "qwen3_moe") else 3)
    for index, routing in trace.routing.items():
        chosen, weights, logits = seen[index]
        spec = decoder.config.layers[index].feed_forward.router
        assert routing.spec == spec
        assert routing.logits.shape == (2, 9, spec.num_experts) and routing.ids.shape == (2, 9, spec.top_k)
        assert routing.logits.dtype == routing.weights.dtype == torch.float32
        assert torch.equal(routing.ids, chosen) and torch.equal(routing.weights, weights)
        assert torch.equal(routing.logits, logits)


def test_nothing_is_kept_without_being_asked_for_and_nothing_changes() -> None:
    decoder, ids = decoder_of("plait_gpt"), some_ids(2, 9)
    without, asked = Trace(layers=(1,)), Trace(router=True)
    with torch.no_grad():
        plain = decoder(ids)
        assert torch.equal(decoder(ids, trace=without), plain) and torch.equal(decoder(ids, trace=asked), plain)
    assert without.routing == {} and list(asked.routing) == [0, 1, 2]
    before = record(decoder).to_json()
    decoder(ids, trace=Trace(router=True))
    assert record(decoder).to_json() == before


def test_gradients_reach_the_routers_through_the_trace() -> None:
    decoder, trace = decoder_of("plait_gpt"), Trace(router=True)
    decoder(some_ids(1, 5), trace=trace)
    trace.routing[1].logits.sum().backward()
    assert decoder.model.layers[1].mlp.gate.weight.grad.norm() > 0
    assert decoder.model.layers[2].mlp.gate.weight.grad is None
    assert decoder.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0  # it came before


# Padding


def padded(ids: Tensor, left: int, right: int, with_token: int) -> tuple[Tensor, Tensor]:
    """The rows between so many more tokens, and the mask of what is real."""
    rows = len(ids)
    parts = [torch.full((rows, left), with_token), ids, torch.full((rows, right), with_token)]
    mask = torch.zeros(rows, left + ids.shape[1] + right, dtype=torch.bool)
    mask[:, left : left + ids.shape[1]] = True
    return torch.cat(parts, 1), mask


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("left", "right"), [(0, 40), (6, 0), (3, 5)])
def test_padding_goes_through_no_expert_and_changes_nothing_of_the_others(family: str, left: int, right: int) -> None:
    """MOE-09: loss and every gradient of five real tokens are those without padding."""
    ids = some_ids(2, 5)
    more, mask = padded(ids, left, right, with_token=1)
    whole, alone = decoder_of(family), decoder_of(family)
    trace = Trace(router=True)
    hidden = whole(more, StepInputs(token_mask=mask), trace=trace)[mask].view(2, 5, -1)
    expected = alone(ids)
    assert torch.allclose(hidden, expected, atol=1e-5)
    for decoder, found in ((whole, hidden), (alone, expected)):
        decoder.logits(found)[:, :-1].flatten(0, 1).log_softmax(-1).gather(
            1, ids[:, 1:].reshape(-1, 1)
        ).sum().backward()
    for (name, p), q in zip(whole.named_parameters(), alone.parameters(), strict=True):
        if q.grad is not None:
            assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5 * q.grad.abs().max().item()), name
    for routing in trace.routing.values():
        assert (routing.ids[~mask] == -1).all() and (routing.ids[mask] >= 0).all()
        assert (routing.weights[~mask] == 0).all() and (routing.weights[mask] > 0).any()


def test_a_mask_without_padding_changes_no_bit() -> None:
    decoder, ids = decoder_of("plait_gpt"), some_ids(2, 9)
    x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1))
    mixture = decoder.model.layers[0].mlp
    with torch.no_grad():
        assert torch.equal(mixture(x), mixture(x, token_mask=torch.ones(2, 9, dtype=torch.bool)))
        assert torch.equal(decoder(ids), decoder(ids, StepInputs()))


def test_experts_give_padding_nothing_and_see_no_row_of_it() -> None:
    """A row that is not a number would spoil every sum that it entered."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 4, generator=generator)
    up, down = torch.randn(3, 6, 4, generator=generator), torch.randn(3, 4, 6, generator=generator)
    ids = torch.tensor([[2, 0], [-1, -1], [1, 2], [-1, -1], [0, 1]], dtype=torch.int32)
    weights = torch.rand(5, 2, generator=generator).masked_fill(ids < 0, 0.0)
    real = ids[:, 0] >= 0
    poisoned = x.masked_fill(~real[:, None], float("nan")).requires_grad_()
    y = experts(poisoned, ids, weights, up, None, down, None, kind="gelu", gated=False)
    assert torch.equal(y[~real], torch.zeros(2, 4))
    assert torch.equal(
        y[real], experts(x[real], ids[real], weights[real], up, None, down, None, kind="gelu", gated=False)
    )
    y.sum().backward()
    assert poisoned.grad is not None and (poisoned.grad[~real] == 0).all() and (poisoned.grad[real] != 0).all()
    nobody = torch.full_like(ids, -1)
    assert not experts(x, nobody, 0 * weights, up, None, down, None, kind="gelu", gated=False).any()


def test_the_worked_example_of_routing() -> None:
    """Choices [[2, 0], [1, 2], [0, 3]]: expert 2 has tokens 0 and 1, in slots 0 and 1 of them."""
    order, (none, *counts) = by_expert(torch.tensor([[2, 0], [1, 2], [0, 3]]), 4)
    slices = dict(enumerate(order[none:].split(counts)))
    assert none == 0 and counts == [2, 1, 2, 1]
    assert ((slices[2] // 2).tolist(), (slices[2] % 2).tolist()) == ([0, 1], [0, 1])
    assert ((slices[0] // 2).tolist(), (slices[0] % 2).tolist()) == ([0, 2], [1, 0])
    order, (none, *counts) = by_expert(torch.tensor([[2, 0], [-1, -1], [0, 3]]), 4)
    assert (none, counts, (order[:2] // 2).tolist()) == (2, [2, 0, 1, 1], [1, 1])
