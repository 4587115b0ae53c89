"""Every parameter of every family has exactly one role."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait.errors import PlaitError
from plait.model.families import families
from plait.training.roles import DECAYED, ROLES, describe_parameters, parameter_roles
from tests.configs import CONFIGS

EXPECTED_BY_NAME = {
    "embed_tokens.weight": "embedding",
    "embed_positions.weight": "embedding",
    "lm_head.weight": "head",
    "gate.weight": "router",
    "shared_expert_gate.weight": "router",
    "gate.bias": "bias",
    "e_score_correction_bias": "selection_bias",
    "experts.gate_up_proj": "expert_stack",
    "experts.down_proj": "expert_stack",
    "norm.weight": "norm",
    "layernorm.weight": "norm",
    "sinks": "other",
    "act_fn.alpha_p": "other",
    "act_fn.alpha_n": "other",
    "act_fn.beta": "other",
    "act_fn.eps": "other",
    "bias": "bias",
    "proj.weight": "matrix",
    "proj_with_mqa.weight": "matrix",
}


def expected(name: str) -> str:
    """By the ends of the names that ARCHITECTURE.md gives to parameters, the longest that fits."""
    ends = [end for end in EXPECTED_BY_NAME if name.endswith(end)]
    if name.endswith(("gate_up_proj_bias", "down_proj_bias")):
        return "bias"
    return EXPECTED_BY_NAME[max(ends, key=len)]


def test_every_registered_family_has_a_configuration() -> None:
    assert set(CONFIGS) == set(families())


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_parameter_has_the_role_of_its_name(family: str) -> None:
    decoder = plait.from_config(CONFIGS[family])
    roles = parameter_roles(decoder)
    assert list(roles) == [name for name, _ in decoder.named_parameters()]
    assert roles == {name: expected(name) for name in roles}
    assert set(roles.values()) <= set(ROLES)


def test_a_tied_head_counts_once_as_embedding() -> None:
    decoder = plait.from_config(CONFIGS["qwen2"])
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    roles = parameter_roles(decoder)
    assert "head" not in roles.values()
    assert roles["model.embed_tokens.weight"] == "embedding"
    untied = parameter_roles(plait.from_config(CONFIGS["llama"]))
    assert untied["lm_head.weight"] == "head"


def test_a_norm_of_two_dimensions_is_a_norm_and_a_stack_is_no_matrix() -> None:
    roles = parameter_roles(plait.from_config(CONFIGS["cohere"]))
    per_head = plait.from_config(CONFIGS["cohere"]).model.layers[0].self_attn.q_norm.weight
    assert per_head.ndim == 2
    assert roles["model.layers.0.self_attn.q_norm.weight"] == "norm"
    mixture = plait.from_config(CONFIGS["qwen3_moe"])
    assert parameter_roles(mixture)["model.layers.0.mlp.experts.down_proj"] == "expert_stack"
    assert "norm" not in DECAYED and "expert_stack" in DECAYED


def test_experts_are_told_apart_and_their_gates_from_the_rest() -> None:
    described = {d.name: d for d in describe_parameters(plait.from_config(CONFIGS["qwen3_moe"]))}
    stack = described["model.layers.0.mlp.experts.gate_up_proj"]
    assert (stack.experts, stack.matrices) == (5, 10)
    down = described["model.layers.0.mlp.experts.down_proj"]
    assert (down.experts, down.matrices) == (5, 5)
    assert (described["model.layers.0.mlp.gate.weight"].experts, described["lm_head.weight"].matrices) == (1, 1)
    joints = [d.name for d in described.values() if d.joint == "model.layers.0.self_attn"]
    assert joints == [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]


def test_a_parameter_without_a_role_is_named() -> None:
    decoder = plait.from_config(CONFIGS["llama"])
    decoder.model.layers[0].mlp.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(PlaitError, match=r"model\.layers\.0\.mlp\.extra of a FeedForward has no role"):
        parameter_roles(decoder)
