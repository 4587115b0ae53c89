"""Routing and experts: the reference operations against brute force, float64 and the routers of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.model.decoder import build
from plait.model.families import parse_config
from plait.model.record import record
from plait.ops import functional as ops
from plait.ops.recording import Value
from plait.ops.reference import ACTIVATIONS
from plait.ops.report import Sizes, totals
from plait.ops.signatures import OPERATIONS
from plait.ops.spec import RouterSpec
from plait.ops.symbolic import Recorder
from tests.configs import CONFIGS
from tests.routers import BY_HAND

TOKENS = 10_000
WIDTH = 24


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def few_values(*shape: int, seed: int = 0) -> Tensor:
    """-1, 0 and 1, so that many logits are equal."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def chosen_one_by_one(selection: Tensor, spec: RouterSpec) -> tuple[list[int], set[int]]:
    """The rules of `RouterSpec` for one token, in Python: (the chosen, best first; the eligible)."""
    scores = selection.tolist()
    eligible = set(range(spec.num_experts))
    if spec.groups:
        size = spec.num_experts // spec.groups
        groups = [scores[g * size : (g + 1) * size] for g in range(spec.groups)]
        taken = 1 if spec.group_score == "best" else 2
        # In fp32, as the sum of two scores is.
        best = [torch.tensor(sorted(group, reverse=True)[:taken]).sum().item() for group in groups]
        ranked = sorted(range(spec.groups), key=lambda g: (-best[g], g))[: spec.top_groups]
        eligible = {e for e in eligible if e // size in ranked}
    masked = 0.0 if spec.masked == "zero" else float("-inf")
    final = [score if e in eligible else masked for e, score in enumerate(scores)]
    return sorted(range(spec.num_experts), key=lambda e: (-final[e], e))[: spec.top_k], eligible


SPECS = {
    "softmax": RouterSpec(12, 3),
    "softmax, renormalised": RouterSpec(12, 3, renormalise="always"),
    "sigmoid, several": RouterSpec(12, 4, "sigmoid", "several", 2.5),
    "sigmoid, several, one": RouterSpec(12, 1, "sigmoid", "several", 2.5),
    "softmax of the chosen": RouterSpec(12, 3, "topk_softmax"),
    "all of them": RouterSpec(12, 12, renormalise="always"),
    "groups by their best, zero": RouterSpec(
        12, 4, scale=1.5, groups=4, top_groups=2, group_score="best", masked="zero"
    ),
    "groups by two": RouterSpec(12, 5, "sigmoid", "always", 2.5, 3, 2, "two_best"),
}


@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "selection bias"])
@pytest.mark.parametrize("name", SPECS)
def test_a_router_follows_its_rules_token_by_token(name: str, biased: bool, ties: bool) -> None:
    """Selection by a plain sort of the very scores; weights by their formula in float64."""
    spec, make = SPECS[name], few_values if ties else random
    x, weight = make(400, 8, seed=1), make(spec.num_experts, 8, seed=2)
    bias = make(spec.num_experts, seed=3) / 4
    selection_bias = make(spec.num_experts, seed=4) / 4 if biased else None
    ids, weights, logits = ops.route(x, weight, bias, selection_bias, spec=spec)
    assert (ids.dtype, weights.dtype, logits.dtype) == (torch.int32, torch.float32, torch.float32)
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T + bias.double(), rtol=1e-5, atol=1e-5)
    kinds = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "topk_softmax": logits}
    scores = kinds[spec.scores]
    selection = scores if selection_bias is None else scores + selection_bias
    exact = logits.double()
    exact = {"softmax": exact.softmax(-1), "sigmoid": exact.sigmoid(), "topk_softmax": exact}[spec.scores]
    equal = 0
    for token in range(len(x)):
        expected, eligible = chosen_one_by_one(selection[token], spec)
        assert ids[token].tolist() == expected
        raw = torch.stack(
            [exact[token, e] if e in eligible or spec.masked != "zero" else 0 * exact[0, 0] for e in expected]
        )
        if spec.scores == "topk_softmax":
            raw = raw.softmax(-1)
        if spec.renormalise == "always" or (spec.renormalise == "several" and spec.top_k > 1):
            raw = raw / (raw.sum() + 1e-20)
        torch.testing.assert_close(weights[token].double(), raw * spec.scale, rtol=1e-5, atol=1e-6)
        equal += len(set(selection[token].tolist())) < spec.num_experts
    assert (equal > 300) == ties


@pytest.mark.parametrize("name", BY_HAND)
def test_weights_that_are_worked_out_by_hand(name: str) -> None:
    scores, bias, spec, chosen, shares = BY_HAND[name]
    selection_bias = None if bias is None else torch.tensor(bias)
    ids, weights, _ = ops.route(torch.ones(1, 1), torch.tensor(scores)[:, None], None, selection_bias, spec=spec)
    assert ids[0].tolist() == chosen
    assert weights[0].tolist() == pytest.approx(shares, abs=2e-6 * spec.scale)


@pytest.mark.parametrize("shift", [-30.0, -3.0, 0.0, 3.0])
def test_experts_come_from_kept_groups_whatever_the_selection_bias(shift: float) -> None:
    """A group scores the sum of its two best biased scores, and no expert of a dropped one is ever chosen."""
    spec = RouterSpec(8, 2, "sigmoid", "always", 2.5, 4, 2, "two_best", "minus_infinity")
    for seed in range(20):
        x, weight, bias = random(10, 8, seed=seed), random(8, 8, seed=seed + 99), shift + random(8, seed=seed + 199)
        ids, _, logits = ops.route(x, weight, None, bias, spec=spec)
        for chosen, scores in zip(ids.tolist(), (logits.sigmoid() + bias).tolist(), strict=True):
            sums = [scores[2 * g] + scores[2 * g + 1] for g in range(4)]
            kept = sorted(range(4), key=lambda g: -sums[g])[:2]
            assert {e // 2 for e in chosen} <= set(kept)
            eligible = [e for e in range(8) if e // 2 in kept]
            assert chosen == sorted(eligible, key=lambda e: -scores[e])[:2]


@pytest.mark.parametrize("lead", [(2, 5), (1,), (0,)])
def test_leading_axes_are_kept(lead: tuple[int, ...]) -> None:
    x = random(*lead, WIDTH)
    ids, weights, logits = ops.route(x, random(6, WIDTH), spec=RouterSpec(6, 2))
    assert ids.shape == weights.shape == (*lead, 2) and logits.shape == (*lead, 6)
    y = ops.experts(x, ids, weights, random(6, 10, WIDTH), None, random(6, WIDTH, 5), None, kind="silu")
    assert y.shape == x.shape


def _config(model_type: str, **keys: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, hidden_size=WIDTH, num_attention_heads=4, **keys)


def _routers() -> dict[str, tuple[Any, RouterSpec]]:
    """Routers of transformers, and what plait says of them."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
    from transformers.models.gpt_oss import modeling_gpt_oss as oss
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.olmoe import modeling_olmoe as olmoe
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    some = {"num_experts": 16, "num_experts_per_tok": 4}
    local = {"num_local_experts": 16, "num_experts_per_tok": 4}
    routed = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    grouped = RouterSpec(16, 4, scale=1.7, groups=4, top_groups=2, masked="zero")
    v3_spec = RouterSpec(16, 4, "sigmoid", "always", 2.5, 4, 2, "two_best", "minus_infinity")
    return {
        "qwen3_moe": (
            qwen3.Qwen3MoeTopKRouter(_config("qwen3_moe", **some, norm_topk_prob=True)),
            RouterSpec(16, 4, renormalise="always"),
        ),
        "qwen2_moe": (qwen2.Qwen2MoeTopKRouter(_config("qwen2_moe", **some)), RouterSpec(16, 4)),
        "olmoe": (olmoe.OlmoeTopKRouter(_config("olmoe", **some)), RouterSpec(16, 4)),
        "mixtral": (
            mixtral.MixtralTopKRouter(_config("mixtral", **local)),
            RouterSpec(16, 4, renormalise="always"),
        ),
        "gpt_oss": (oss.GptOssTopKRouter(_config("gpt_oss", **local)), RouterSpec(16, 4, "topk_softmax")),
        "deepseek_v2, greedy": (
            v2.DeepseekV2TopkRouter(_config("deepseek_v2", **routed, topk_method="greedy", routed_scaling_factor=1.7)),
            RouterSpec(16, 4, scale=1.7),
        ),
        "deepseek_v2, groups": (
            v2.DeepseekV2TopkRouter(
                _config("deepseek_v2", **routed, topk_method="group_limited_greedy", routed_scaling_factor=1.7)
            ),
            grouped,
        ),
        "deepseek_v2, one group": (
            v2.DeepseekV2TopkRouter(
                _config(
                    "deepseek_v2",
                    **routed | {"n_group": 1, "topk_group": 1},
                    topk_method="group_limited_greedy",
                    routed_scaling_factor=1.7,
                )
            ),
            RouterSpec(16, 4, scale=1.7),
        ),
        "deepseek_v3": (
            v3.DeepseekV3TopkRouter(_config("deepseek_v3", **routed, norm_topk_prob=True, routed_scaling_factor=2.5)),
            v3_spec,
        ),
        "deepseek_v3, as they are": (
            v3.DeepseekV3TopkRouter(_config("deepseek_v3", **routed, norm_topk_prob=False, routed_scaling_factor=1.0)),
            RouterSpec(16, 4, "sigmoid", "never", 1.0, 4, 2, "two_best", "minus_infinity"),
        ),
    }


NAMES = (
    *("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v2, greedy", "deepseek_v2, groups"),
    *("deepseek_v2, one group", "deepseek_v3", "deepseek_v3, as they are"),
)


def test_the_list_of_routers_is_whole() -> None:
    assert set(_routers()) == set(NAMES)


@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize("name", NAMES)
def test_routing_equals_that_of_transformers_expert_by_expert(name: str, ties: bool) -> None:
    """On ties transformers' choice depends on the device; then the weights that it gives must be the same."""
    router, spec = _routers()[name]
    make = few_values if ties else random
    x = make(TOKENS, WIDTH, seed=5)
    bias = make(16, seed=7) / 4
    with torch.no_grad():
        router.weight.copy_(make(16, WIDTH, seed=6) / (4 if ties else 2))
        if hasattr(router, "bias"):
            router.bias.copy_(bias)
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(bias)
        their_logits, their_weights, their_ids = router(x)
        ids, weights, logits = ops.route(
            x,
            router.weight,
            getattr(router, "bias", None),
            getattr(router, "e_score_correction_bias", None),
            spec=spec,
        )
    assert torch.equal(logits, their_logits)
    if not ties:
        theirs, order = their_ids.sort(-1)
        ours, own = ids.long().sort(-1)
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(weights.gather(-1, own), their_weights.gather(-1, order), rtol=1e-5, atol=1e-7)
        return
    same = (ids.long().sort(-1).values == their_ids.sort(-1).values).all(-1)
    assert 0.05 < same.float().mean() < 1, "ties where the choice is free, and tokens where it is not"
    if not spec.groups:  # equal groups differ within, and a selection bias makes equal sums of unequal scores
        torch.testing.assert_close(weights.sort(-1).values, their_weights.sort(-1).values, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights[same].sort(-1).values, their_weights[same].sort(-1).values, rtol=1e-5, atol=1e-7)


def test_a_router_computes_in_fp32_whatever_comes_in() -> None:
    x, weight = random(50, WIDTH).bfloat16(), random(8, WIDTH, seed=1)
    spec = RouterSpec(8, 2, renormalise="always")
    for given, expected in zip(ops.route(x, weight, spec=spec), ops.route(x.float(), weight, spec=spec), strict=True):
        assert torch.equal(given, expected)


def _stacks(count: int, inner: int, gated: bool, biases: bool) -> list[Tensor | None]:
    rows = 2 * inner if gated else inner
    return [
        random(count, rows, WIDTH, seed=11) / WIDTH**0.5,
        random(count, rows, seed=12) if biases else None,
        random(count, WIDTH, inner, seed=13) / inner**0.5,
        random(count, WIDTH, seed=14) if biases else None,
    ]


def _brute_force(x: Tensor, ids: Tensor, weights: Tensor, stacks: list[Any], kind: str, gated: bool) -> Tensor:
    """Token by token and expert by expert."""
    gate_up, gate_up_bias, down, down_bias = stacks
    rows = []
    for token, chosen, shares in zip(x, ids.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            hidden = gate_up[expert] @ token + (0 if gate_up_bias is None else gate_up_bias[expert])
            if gated:
                half = len(hidden) // 2
                hidden = ACTIVATIONS[kind](hidden[:half]) * hidden[half:]
            else:
                hidden = ACTIVATIONS[kind](hidden)
            total = total + share * (down[expert] @ hidden + (0 if down_bias is None else down_bias[expert]))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize(("gated", "kind"), [(True, "silu"), (True, "gelu_tanh"), (False, "relu_squared")])
def test_experts_equal_brute_force_in_float64(gated: bool, kind: str, biases: bool) -> None:
    x, stacks = random(33, WIDTH), _stacks(6, 10, gated, biases)
    ids, weights, _ = ops.route(x, random(6, WIDTH, seed=2), spec=RouterSpec(6, 3, scale=1.3))
    found = ops.experts(x, ids, weights, *stacks, kind=kind, gated=gated)
    exact = _brute_force(
        x.double(), ids, weights.double(), [s if s is None else s.double() for s in stacks], kind, gated
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_experts_that_nobody_chose_and_experts_chosen_by_all_are_the_same_operation() -> None:
    x, stacks = random(7, WIDTH), _stacks(5, 10, True, False)
    ids = torch.tensor([[3, 1]] * 7, dtype=torch.int32)
    weights = random(7, 2, seed=4)
    found = ops.experts(x, ids, weights, *stacks, kind="silu")
    torch.testing.assert_close(found, _brute_force(x, ids, weights, stacks, "silu", True), rtol=1e-4, atol=1e-5)


def test_the_sum_over_experts_is_made_in_fp32_and_rounded_once() -> None:
    """In bf16 the products would be rounded before they are added up: 1 + 2^-9 - 1 would be 0."""
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    up = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    down = torch.tensor([1.0, 2.0**-9, -1.0], dtype=torch.bfloat16).reshape(3, 1, 1)
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    y = ops.experts(x, ids, torch.ones(1, 3), up, None, down, None, kind="relu", gated=False)
    assert y.dtype == torch.bfloat16 and y.item() == 2.0**-9


def test_gradients_equal_those_of_brute_force() -> None:
    x, router, stacks = random(9, WIDTH), random(5, WIDTH, seed=2), _stacks(5, 10, True, True)
    spec = RouterSpec(5, 2, renormalise="always", scale=1.4)

    def gradients(run: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, router, *stacks)]
        ids, weights, _ = ops.route(leaves[0], leaves[1], spec=spec)
        y = run(leaves[0], ids, weights, leaves[2:])
        return list(torch.autograd.grad((y * random(9, WIDTH, seed=8)).sum(), leaves))

    ours = gradients(lambda x, i, w, s: ops.experts(x, i, w, *s, kind="silu"))
    expected = gradients(lambda x, i, w, s: _brute_force(x, i, w, s, "silu", True))
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_a_gate_of_one_number_per_token_scales_its_row() -> None:
    x, y = random(4, 1), random(4, WIDTH, seed=1)
    assert torch.equal(ops.gate(x, y, kind="sigmoid"), torch.sigmoid(x) * y)


def test_recorded_shapes_and_the_cost_of_the_experts_that_are_active() -> None:
    """2 * k * (2F * D + D * F) per token, whatever the number of experts."""
    router, (gate_up, _, down, _) = torch.nn.Parameter(random(6, WIDTH)), _stacks(6, 10, True, False)
    assert gate_up is not None and down is not None
    names = {id(router): "router", id(gate_up): "gate_up", id(down): "down"}
    recorder = Recorder(names)
    x = recorder.input("x", Value(("N", WIDTH)))
    spec = RouterSpec(6, 2)
    ids, weights, logits = ops.route(x, router, spec=spec)
    y = ops.experts(x, ids, weights, gate_up, None, down, None, kind="silu")
    assert (ids.value, weights.value, logits.value) == (
        Value(("N", 2), "i32"),
        Value(("N", 2), "f32"),
        Value(("N", 6), "f32"),
    )
    assert y.value == Value(("N", WIDTH))
    first, second = recorder.recording({"y": y}).ops
    assert first.attrs == {"spec": spec.to_json()} and RouterSpec(**first.attrs["spec"]) == spec
    assert second.attrs == {"kind": "silu", "gated": True}
    values = [Value(("N", WIDTH)), ids.value, weights.value]
    assert OPERATIONS["route"].flops(values[:1], first.weights, first.attrs) == 2 * 6 * WIDTH
    assert OPERATIONS["experts"].flops(values, second.weights, second.attrs) == 2 * 2 * (20 * WIDTH + WIDTH * 10)


def test_gate_costs_what_it_did() -> None:
    value = Value(("N", WIDTH))
    assert OPERATIONS["gate"].flops([value, value], (), {}) == 6 * WIDTH
    assert OPERATIONS["gate"].infer([Value(("N", 1)), value], (), {}) == (value,)


def test_a_step_reads_the_experts_that_its_tokens_can_choose() -> None:
    """olmoe here: 3 layers of 6 experts of 3 * 24 * 40 numbers, 2 of them per token."""
    recording = record(build(parse_config(CONFIGS["olmoe"]), device="meta"))
    expert = 3 * 24 * 40
    one, two, many = (totals(recording, 1, Sizes.of(1, length))["weight_bytes_read_per_step"] for length in (1, 2, 50))
    assert totals(recording, 1)["weight_bytes_read_per_step"] == one
    assert (two - one, many - one) == (3 * 2 * expert, 3 * 4 * expert)


def scores_of(scores: list[float]) -> tuple[Tensor, Tensor]:
    """An input and a router weight whose sigmoid scores are these."""
    p = torch.tensor(scores)
    return torch.ones(1, 1), (p / (1 - p)).log()[:, None]


def test_a_selection_bias_is_no_part_of_the_weights() -> None:
    spec = RouterSpec(4, 2, "sigmoid", "always", 2.5)
    x, weight = scores_of([0.9, 0.8, 0.1, 0.1])
    ids, weights, _ = ops.route(x, weight, None, torch.tensor([-5.0, 0.0, 5.0, 0.0]), spec=spec)
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.277778, 2.222222]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("renormalise", "scale"), [("never", 16.0), ("never", 1.0), ("always", 16.0), ("always", 1.0)])
def test_weights_are_scaled_whether_or_not_they_are_renormalised(renormalise: Any, scale: float) -> None:
    x, weight = scores_of([0.5, 0.25, 0.2])
    _, weights, _ = ops.route(x, weight, spec=RouterSpec(3, 2, "sigmoid", renormalise, scale))
    raw = torch.tensor([[0.5, 0.25]]) / (0.75 if renormalise == "always" else 1.0)
    torch.testing.assert_close(weights, raw * scale)


def test_experts_of_dropped_groups_are_never_chosen_however_low_the_others_score() -> None:
    """Biases far below every score: masked with 0, an expert of a dropped group would be the best."""
    spec = RouterSpec(8, 2, "sigmoid", groups=4, top_groups=2, group_score="two_best")
    x, weight = random(500, WIDTH, seed=1), random(8, WIDTH, seed=2)
    bias = -3.0 + random(8, seed=3)
    ids, _, logits = ops.route(x, weight, None, bias, spec=spec)
    selection = logits.sigmoid() + bias
    assert selection.max() < 0
    for token in range(len(x)):
        expected, eligible = chosen_one_by_one(selection[token], spec)
        assert ids[token].tolist() == expected and set(expected) <= eligible
