"""The losses of mixtures against the papers' formulas in float64, transformers' function, and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import UsageError
from plait.model.decoder import Decoder, Trace
from plait.model.layers import Routing
from plait.ops.spec import RouterSpec
from plait.ops.step import StepInputs
from plait.training.mixture import (
    RoutingStats,
    active_experts,
    balance_loss,
    mark_active_experts,
    routing_sums,
    update_selection_bias,
    z_loss,
)
from tests.configs import CONFIGS

pytestmark = pytest.mark.usefixtures("one_thread")


def routed(logits: Tensor, top_k: int, **rules: str) -> Routing:
    """A softmax router's decision, chosen the plain way."""
    ids = logits.detach().topk(top_k).indices.int()
    return Routing(logits, ids, logits.softmax(-1).gather(-1, ids.long()), RouterSpec(logits.shape[-1], top_k, **rules))  # type: ignore[arg-type]


def some_logits(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def whole(logits: Sequence[Tensor], top_k: int) -> Tensor:
    """The balance loss of one batch."""
    sums = routing_sums(dict(enumerate(routed(each, top_k) for each in logits)))
    return balance_loss(sums, sums.tokens)


def formula(logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Sum over layers of E sum_e f_e P_e, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in logits:
        tokens, experts = layer.shape
        for e in range(experts):
            chosen = sum(e in row.topk(top_k).indices.tolist() for row in layer.detach())
            mean = sum(row.exp()[e] / row.exp().sum() for row in layer) / tokens
            total = total + experts * chosen / (top_k * tokens) * mean
    return total


# The balance loss


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_it_is_one_per_layer_where_all_experts_are_alike_whatever_k_is(top_k: int) -> None:
    """Equal probabilities, and every expert chosen equally often: 12 tokens, whose choices begin one further each."""
    logits = torch.zeros(12, 4, dtype=torch.float64)
    ids = (torch.arange(12)[:, None] + torch.arange(top_k)) % 4
    alike = Routing(logits, ids.int(), torch.full((12, top_k), 0.25), RouterSpec(4, top_k))
    sums = routing_sums({0: alike, 5: alike})
    assert balance_loss(sums, 12).item() == pytest.approx(2.0, abs=1e-12)


def test_the_collapse_onto_two_of_four_costs_two() -> None:
    """MOE-08: f = P = (1/2, 1/2, 0, 0), so 4 (1/4 + 1/4) = 2."""
    logits = torch.tensor([[50.0, 50.0, -50.0, -50.0]], dtype=torch.float64).expand(8, 4)
    assert whole([logits], 2).item() == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize("top_k", [1, 2])
def test_value_and_gradient_are_the_formulas(top_k: int) -> None:
    logits = [some_logits(9, 5, seed=seed) for seed in (1, 2)]
    ours = torch.autograd.grad(whole(logits, top_k), logits)
    theirs = torch.autograd.grad(formula(logits, top_k), logits)
    assert whole(logits, top_k).item() == pytest.approx(formula(logits, top_k).item(), abs=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-12) and a.abs().max() > 1e-3


def test_the_gradient_is_that_of_finite_differences() -> None:
    """MOE-08; the choices of experts are far from a tie, so they do not change."""
    (logits,) = (some_logits(4, 4, seed=3),)
    assert torch.autograd.gradcheck(lambda x: whole([x], 2), (logits,), eps=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_conversion_to_the_loss_of_transformers(top_k: int) -> None:
    """Of one layer theirs is k times ours. Of several, theirs is made of means over all layers' tokens; where the
    layers agree it is k times ours divided by their number."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as theirs

    logits = [some_logits(2 * 7, 6, seed=seed, dtype=torch.float32).detach() for seed in (4, 5)]
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = mask[1, 6:] = False
    sums = routing_sums({i: routed(each.view(2, 7, 6), top_k) for i, each in enumerate(logits)}, mask)
    one_by_one = [theirs((each,), 6, top_k, mask) for each in logits]
    assert balance_loss(sums, sums.tokens).item() == pytest.approx(sum(map(float, one_by_one)) / top_k, rel=1e-5)
    same = theirs((logits[0],) * 3, 6, top_k, mask)
    thrice = routing_sums({i: routed(logits[0].view(2, 7, 6), top_k) for i in range(3)}, mask)
    assert balance_loss(thrice, thrice.tokens).item() == pytest.approx(float(same) * 3 / top_k, rel=1e-5)


def test_a_sigmoid_router_has_its_scores_divided_by_their_sum() -> None:
    logits = some_logits(6, 4)
    sums = routing_sums({0: routed(logits, 2, scores="sigmoid")})
    scores = 1 / (1 + (-logits).exp())
    assert torch.allclose(sums.probabilities[0], (scores / scores.sum(-1, keepdim=True)).sum(0))


# The z-loss


def test_z_is_the_mean_square_of_the_log_partition_summed_over_layers() -> None:
    logits = [some_logits(7, 5, seed=seed) for seed in (6, 7)]
    expected = sum((layer.exp().sum(-1).log() ** 2).mean() for layer in logits)
    sums = routing_sums(dict(enumerate(routed(each, 2) for each in logits)))
    assert torch.allclose(z_loss(sums, 7), expected)
    assert torch.autograd.gradcheck(lambda x: z_loss(routing_sums({0: routed(x, 2)}), 7), (logits[0],))


# Cut into micro-batches


CUTS = [(20,), (7, 13), (1, 9, 4, 6), (20, 0)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_with_the_steps_counts_no_loss_depends_on_how_the_step_is_cut(cut: tuple[int, ...]) -> None:
    logits = some_logits(20, 5)
    sums = [routing_sums({0: routed(part, 2)}) for part in logits.split(cut)]
    counts = sum((each.slots for each in sums), torch.zeros(1, 5, dtype=torch.int64))
    total = sum(balance_loss(each, 20, counts) + z_loss(each, 20) for each in sums)
    expected = formula([logits], 2) + (logits.logsumexp(-1) ** 2).mean()
    assert torch.allclose(total, expected)
    assert torch.allclose(*(torch.autograd.grad(loss, logits)[0] for loss in (total, expected)))


def test_with_counts_of_their_own_it_is_the_mean_over_micro_batches_weighted_by_tokens() -> None:
    logits = some_logits(20, 5)
    parts = logits.split((7, 13))
    total = sum(balance_loss(routing_sums({0: routed(part, 2)}), 20) for part in parts)
    assert torch.allclose(total, (7 * formula([parts[0]], 2) + 13 * formula([parts[1]], 2)) / 20)
    assert abs(total.item() - formula([logits], 2).item()) > 1e-3


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    logits = some_logits(20, 5)
    first, second = (routing_sums({3: routed(part, 2)}) for part in logits.split((7, 13)))
    both, expected = first + second, routing_sums({3: routed(logits, 2)})
    assert (both.layers, both.tokens, both.top_k) == ((3,), 20, 2)
    assert torch.equal(both.slots, expected.slots) and torch.allclose(both.probabilities, expected.probabilities)
    assert torch.allclose(both.z, expected.z) and not both.detach().z.requires_grad
    with pytest.raises(UsageError, match="do not add up"):
        first + routing_sums({4: routed(logits, 2)})


# On a model: padding


def forward(decoder: Decoder, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, dict[int, Routing]]:
    trace = Trace(router=True)
    hidden = decoder(ids, StepInputs(token_mask=mask), trace=trace)
    return hidden, trace.routing


@pytest.mark.parametrize("family", ["plait_gpt", "deepseek_v3"])
def test_five_tokens_padded_to_64_have_the_losses_loads_and_gradients_of_five(family: str) -> None:
    """MOE-09, through all losses together."""
    ids = torch.randint(2, 96, (1, 5), generator=torch.Generator().manual_seed(3))
    more, mask = torch.zeros(1, 64, dtype=torch.int64), torch.arange(64)[None] < 5
    more[:, :5] = ids
    found = []
    for tokens, token_mask in ((ids, None), (more, mask)):
        decoder = plait.from_config(CONFIGS[family], seed=2)
        hidden, routing = forward(decoder, tokens, token_mask)
        sums = routing_sums(routing, token_mask)
        logits = decoder.logits(hidden)[:, :4].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / 4
        loss = loss + 0.01 * balance_loss(sums, sums.tokens) + 0.001 * z_loss(sums, sums.tokens)
        loss.backward()
        found.append((loss.item(), sums, {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}))
    (alone, a, expected), (padded, b, gradients) = found
    assert padded == pytest.approx(alone, abs=1e-6)
    assert a.tokens == b.tokens == 5 and torch.equal(a.slots, b.slots)
    assert torch.allclose(a.z, b.z, rtol=1e-6) and torch.allclose(a.probabilities, b.probabilities, atol=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name


def test_a_mask_of_some_tokens_counts_those_alone() -> None:
    """As an evaluation counts by language and side."""
    decoder = plait.from_config(CONFIGS["plait_gpt"], seed=2)
    ids = torch.randint(2, 96, (2, 8), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        _, routing = forward(decoder, ids, None)
    source = torch.arange(8).expand(2, 8) < 3
    parts = [routing_sums(routing, each).slots for each in (source, ~source)]
    assert torch.equal(parts[0] + parts[1], routing_sums(routing).slots)
    for row, layer in zip(parts[0], routing.values(), strict=True):
        assert row.tolist() == [int((layer.ids[:, :3] == e).sum()) for e in range(5)]


def test_without_a_trace_of_routers_there_is_nothing_to_sum() -> None:
    dense = plait.from_config({**CONFIGS["plait_gpt"], "use_moe": False, "d_ff": 16})
    trace = Trace(router=True)
    dense(torch.tensor([[1, 2]]), trace=trace)
    with pytest.raises(UsageError, match="no mixture, or its trace was not Trace"):
        routing_sums(trace.routing)


# Figures, idle experts, the selection bias


def test_the_figures_of_a_log() -> None:
    """Ten choices: 5, 3, 2 and 0; z of equal logits c is (c + ln 4)^2."""
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2]).view(5, 2).int()
    stats = RoutingStats()
    assert stats.layers() == {}
    for part, c in ((slice(0, 2), 1.0), (slice(2, 5), 3.0)):
        logits = torch.full((5, 4), c)[part]
        stats.add(routing_sums({2: Routing(logits, ids[part], torch.ones(5, 2)[part], RouterSpec(4, 2))}))
    (layer, figures), *others = stats.layers().items()
    assert layer == 2 and not others
    assert figures["load"] == pytest.approx([0.5, 0.3, 0.2, 0.0])
    entropy = -(0.5 * log(0.5) + 0.3 * log(0.3) + 0.2 * log(0.2)) / log(4)
    assert figures["entropy"] == pytest.approx(entropy)
    assert figures["z"] == pytest.approx((2 * (1 + log(4)) ** 2 + 3 * (3 + log(4)) ** 2) / 5)
    assert figures["dropped"] == 0


def test_a_choice_that_reaches_no_expert_is_counted_as_dropped() -> None:
    """None is, but the figure would tell: here the forward held two tokens for padding that the log does not."""
    logits = torch.zeros(4, 4)
    ids = torch.tensor([[0, 1], [-1, -1], [2, 3], [-1, -1]]).int()
    routing = {0: Routing(logits, ids, torch.ones(4, 2), RouterSpec(4, 2))}
    stats = RoutingStats()
    stats.add(routing_sums(routing, torch.ones(4, dtype=torch.bool)))
    assert stats.layers()[0]["dropped"] == 4
    assert routing_sums(routing).tokens == 2


def test_idle_experts_are_marked_for_the_optimiser_and_have_no_gradient() -> None:
    decoder = plait.from_config({**CONFIGS["plait_gpt"], "top_k": 1, "n_experts": 8}, seed=2)
    ids = torch.randint(2, 96, (1, 4), generator=torch.Generator().manual_seed(3))
    hidden, routing = forward(decoder, ids, None)
    hidden.square().sum().backward()
    sums = routing_sums(routing)
    mark_active_experts(decoder, sums)
    active = active_experts(sums)
    assert active.any(-1).all() and not active.all(-1).any()  # four tokens, eight experts
    for row, layer in zip(active, decoder.model.layers, strict=True):
        for stack in layer.mlp.experts.parameters():
            assert torch.equal(stack.active_experts, row)
            assert torch.equal(stack.grad.flatten(1).any(1), row)
    mark_active_experts(decoder, routing_sums({0: routed(8 * torch.eye(8), 1)}))
    assert decoder.model.layers[0].mlp.experts.down_proj.active_experts is None


def test_the_selection_bias_moves_by_gamma_towards_the_mean_load() -> None:
    """Slots 5, 3, 2 and 2 of 12, a mean of 3: down, not at all, up, up."""
    decoder = plait.from_config({**CONFIGS["plait_gpt"], "n_experts": 4, "selection_bias": True, "n_layers": 1})
    ids = torch.tensor([0] * 5 + [1] * 3 + [2] * 2 + [3] * 2).view(6, 2).int()
    sums = routing_sums({0: Routing(torch.zeros(6, 4), ids, torch.ones(6, 2), RouterSpec(4, 2))})
    update_selection_bias(decoder, sums, gamma=0.25)
    update_selection_bias(decoder, sums, gamma=0.5)
    bias = decoder.model.layers[0].mlp.gate.e_score_correction_bias
    assert bias.tolist() == [-0.75, 0.0, 0.75, 0.75] and not bias.requires_grad
    plain = plait.from_config({**CONFIGS["plait_gpt"], "n_experts": 4, "n_layers": 1})
    with pytest.raises(UsageError, match="this plait_gpt has no selection bias to update"):
        update_selection_bias(plain, sums)


def test_the_router_is_float32_under_autocast_too() -> None:
    decoder = plait.from_config(CONFIGS["plait_gpt"], seed=2)
    seen = []
    gate = decoder.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], out[2])))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        decoder(torch.tensor([[5, 6, 7]]))
    ((x, logits),) = seen
    assert logits.dtype == torch.float32
    assert torch.equal(logits, x.float() @ gate.weight.T) or torch.allclose(
        logits, x.float() @ gate.weight.T, rtol=1e-6
    )
