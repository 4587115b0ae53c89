"""What every parameter of a decoder is for: which optimiser takes it, and whether it decays, follows from that.

A role comes from the module that owns the parameter, never from the number of dimensions: a stack of experts has
three, a norm of heads two, and the gate of a shared expert is a matrix of one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from plait.errors import PlaitError
from plait.model.decoder import Embedding, Head
from plait.model.layers import XIELU, Attention, Experts, Linear, Mixture, Norm, Router

Role = Literal["embedding", "head", "matrix", "expert_stack", "router", "norm", "bias", "selection_bias", "other"]
ROLES: tuple[Role, ...] = get_args(Role)

# Roles whose parameters weight decay pulls towards zero. For a norm zero is no neutral place; biases, sinks and the
# numbers of an activation are too few to overfit.
DECAYED: tuple[Role, ...] = ("embedding", "head", "matrix", "expert_stack", "router")
# The selection bias moves by a rule of its own, not by a gradient.
WITHOUT_GRADIENT: tuple[Role, ...] = ("selection_bias",)

# The roles of a module's own parameters, by their names in it; the first entry that the module is an instance of. A
# tied head is the embedding's parameter and counts once, as that.
OWNERS: list[tuple[type[nn.Module], Mapping[str, Role]]] = [
    (Head, {"weight": "head", "bias": "bias"}),
    (Embedding, {"weight": "embedding"}),  # of tokens, and of positions where they are learned
    (Norm, {"weight": "norm", "bias": "bias"}),
    (Linear, {"weight": "matrix", "bias": "bias"}),
    (Attention, {"sinks": "other"}),  # a logit per head
    (XIELU, {"alpha_p": "other", "alpha_n": "other", "beta": "other", "eps": "other"}),
    (Router, {"weight": "router", "bias": "bias", "e_score_correction_bias": "selection_bias"}),
    (
        Experts,
        {
            "gate_up_proj": "expert_stack",
            "down_proj": "expert_stack",
            "gate_up_proj_bias": "bias",
            "down_proj_bias": "bias",
        },
    ),
]


@dataclass(frozen=True, eq=False)
class Described:
    """A parameter and what optimisers must know of it.

    experts: E where row e of the first axis belongs to expert e alone, else 1. matrices: the equal parts of its memory
    that would be parameters of their own if experts were not stacked (each expert's, and of gated experts the gate's
    and the other half), else 1.
    joint: the name of the attention whose q, k or v projection this is, else "".
    """

    name: str
    parameter: nn.Parameter
    role: Role
    experts: int = 1
    matrices: int = 1
    joint: str = ""


def describe_parameters(decoder: nn.Module) -> list[Described]:
    """Every parameter once, frozen ones too, in the order of `named_parameters`.

    Raises PlaitError for a parameter whose module has no entry in OWNERS.
    """
    found: dict[int, Described] = {}
    modules = dict(decoder.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        for local, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{local}" if path else local
            role = _role(name, local, module, modules.get(path.rpartition(".")[0]))
            before = found.get(id(parameter))
            if before is not None:
                if {before.role, role} not in ({"embedding", "head"}, {role}):
                    raise PlaitError(f"{before.name} and {name} are one parameter, as {before.role} and as {role}")
                if role != "embedding" or before.role == "embedding":
                    continue
            found[id(parameter)] = Described(name, parameter, role, *_parts(local, module), _joint(path, modules))
    return list(found.values())


def parameter_roles(decoder: nn.Module) -> dict[str, Role]:
    """The role of every parameter by its name; a tied head is in it once, as the embedding.

    Raises PlaitError for a parameter without a role.
    """
    return {described.name: described.role for described in describe_parameters(decoder)}


def _role(name: str, local: str, module: nn.Module, parent: nn.Module | None) -> Role:
    # The gate of a shared expert says how much of it a token gets: a router of one row.
    if isinstance(parent, Mixture) and module is getattr(parent, "shared_expert_gate", None):
        return "router"
    for kind, roles in OWNERS:
        if isinstance(module, kind) and local in roles:
            return roles[local]
    raise PlaitError(
        f"parameter {name} of a {type(module).__name__} has no role: give it one in OWNERS of plait.training.roles"
    )


def _parts(local: str, module: nn.Module) -> tuple[int, int]:
    """(experts, matrices)"""
    if not isinstance(module, Experts):
        return 1, 1
    experts = module.spec.router.num_experts
    return experts, experts * (2 if module.spec.gated and local.startswith("gate_up_proj") else 1)


def _joint(path: str, modules: Mapping[str, nn.Module]) -> str:
    """The attention in which q, k and v come from one input by three matrices."""
    parent, _, local = path.rpartition(".")
    return parent if local in ("q_proj", "k_proj", "v_proj") and isinstance(modules[parent], Attention) else ""
