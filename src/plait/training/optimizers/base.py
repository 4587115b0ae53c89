"""The optimiser that all of them are: groups by role, float32 state, a step that moves pieces by a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import PlaitError, UsageError
from plait.training.optimizers import native
from plait.training.optimizers.pieces import Moved, Pieces
from plait.training.optimizers.rules import Numbers, Rule
from plait.training.roles import WITHOUT_GRADIENT, Described, Role


@dataclass(frozen=True)
class GroupSpec:
    """A parameter group: the roles that it takes and the rule that moves them.

    numbers: what the rule reads of the group beside lr and weight_decay; JSON can hold it.
    """

    name: str
    roles: tuple[Role, ...]
    rule: Rule
    lr: float
    weight_decay: float
    numbers: Mapping[str, Any] = field(default_factory=dict)


class RoleOptimizer(torch.optim.Optimizer):
    """An optimiser whose groups are made of roles. Make one with `build_optimizer`.

    A group has `name`, `roles`, `rule`, `lr`, `initial_lr`, `weight_decay` and what its rule reads. All state is
    float32 and there from the beginning, beside `step`, int64 [experts] (1 for what is no stack). A parameter of
    another dtype has a float32 copy in its state, `master`, which the step moves and the parameter is rounded from.

    An expert that got no token (`parameter.active_experts[e]` is False) is left alone with its state: no decay, no
    momentum, and its count of steps stands. It is as if it were a parameter without a gradient.
    """

    def __init__(self, described: Iterable[Described], specs: Iterable[GroupSpec]) -> None:
        """Raises PlaitError where groups do not take every trainable parameter exactly once; UsageError without any."""
        self.described = list(described)
        taken = claim(self.described, list(specs))
        self._closed = False
        super().__init__([_group(spec, members) for spec, members in taken], {})
        self._closed = True
        self._members = [members for _, members in taken]
        self._rules = [spec.rule for spec, _ in taken]
        self._pieces = [Pieces(members, spec.rule.by_matrix) for spec, members in taken]
        for spec, members in taken:
            for d in members:
                self.state[d.parameter] = _new_state(d, spec.rule.states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: groups follow from the decoder's roles."""
        if self._closed:
            raise UsageError("groups follow from the decoder's roles: build another optimiser for other parameters")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every parameter that has a gradient, by the gradients as they are. Returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batch = native.Batch()
        for index in range(len(self.param_groups)):
            self._step_group(index, batch)
        for rule, moved, measured in batch.run():
            self._take_measured(rule, moved, measured)
        for members in self._members:
            for d in members:
                master = self.state[d.parameter].get("master")
                if master is not None and d.parameter.grad is not None:
                    d.parameter.copy_(master)
        return loss

    def _step_group(self, index: int, batch: native.Batch) -> None:
        """Moves one group: what the library can do goes into the batch, the rest happens at once."""
        group, rule = self.param_groups[index], self._rules[index]
        moved = self._pieces[index].begin(self.state)
        if not len(moved.owner):
            return
        numbers, tensors = rule.numbers(group, moved.steps), self._tensors(index)
        fits = np.array([native.fits(tensor) for tensor in tensors[0]])[moved.owner]
        if fits.any():
            batch.add(rule.name, moved.select(fits), tensors, _select(numbers, fits))
        if not fits.all():
            rest = moved.select(~fits)
            parameters, *states = (rest.views(kind) for kind in tensors)
            gradients = rest.views(rest.gradients)
            measured = rule.update(parameters, gradients, states, _select(numbers, ~fits))
            if measured is not None:
                self._take_measured(rule.name, rest, measured)

    def _take_measured(self, rule: str, moved: Moved, measured: Sequence[Any]) -> None:
        """What a rule measured of every piece in this step."""

    def _tensors(self, index: int) -> list[list[Tensor]]:
        """What a step moves of a group's parameters (the parameters or their masters), then their states by name."""
        held = [(d.parameter, self.state[d.parameter]) for d in self._members[index]]
        names = self._rules[index].states
        for d in self._members[index]:
            if self.state[d.parameter][names[0]].device != d.parameter.device:
                raise UsageError(f"{d.name} moved to {d.parameter.device}: build the optimiser after moving the model")
        return [
            [state.get("master", parameter.detach()) for parameter, state in held],
            *([state[name] for _, state in held] for name in names),
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies the `state_dict()` of an optimiser of the same kind and parameters; what follows is bit-identical.

        Raises UsageError that names the first difference, before anything has changed.
        """
        saved = list(state_dict["param_groups"])
        names, theirs = [group["name"] for group in self.param_groups], [group["name"] for group in saved]
        if names != theirs:
            raise UsageError(f"the saved optimiser has the groups {theirs}, this one {names}")
        copies: list[tuple[Tensor, Tensor]] = []
        for mine, other, members in zip(self.param_groups, saved, self._members, strict=True):
            _check_group(mine, other)
            for d, index in zip(members, other["params"], strict=True):
                copies += _copies(d, self.state[d.parameter], state_dict["state"][index])
        for mine, other in zip(self.param_groups, saved, strict=True):
            for key, value in other.items():
                if key != "params":
                    mine[key] = tuple(value) if isinstance(mine.get(key), tuple) else value
        for tensor, value in copies:
            tensor.copy_(value)


def claim(described: list[Described], specs: list[GroupSpec]) -> list[tuple[GroupSpec, list[Described]]]:
    """The members of every group that has any. Frozen parameters and those without a gradient belong to none.

    Raises PlaitError for a trainable parameter that no group takes, or more than one; UsageError where nothing trains.
    """
    trainable = [d for d in described if trains(d)]
    if not trainable:
        raise UsageError("no parameter of this model is trainable: nothing to optimise")
    for d in trainable:
        if d.parameter.is_meta:
            raise UsageError(f"{d.name} has no numbers (a packed model): load it with plait.load(..., dtype=...)")
        claims = [spec.name for spec in specs if d.role in spec.roles]
        if len(claims) != 1:
            raise PlaitError(f"{d.name} ({d.role}) is claimed by {len(claims)} groups {claims}: it needs exactly one")
    members = [(spec, [d for d in trainable if d.role in spec.roles]) for spec in specs]
    return [(spec, found) for spec, found in members if found]


def trains(described: Described) -> bool:
    """Whether an optimiser moves it."""
    return described.parameter.requires_grad and described.role not in WITHOUT_GRADIENT


def _group(spec: GroupSpec, members: list[Described]) -> dict[str, Any]:
    return {
        "params": [(d.name, d.parameter) for d in members],
        "name": spec.name,
        "roles": [role for role in spec.roles if any(d.role == role for d in members)],
        "rule": spec.rule.name,
        "lr": spec.lr,
        "initial_lr": spec.lr,
        "weight_decay": spec.weight_decay,
        **spec.numbers,
    }


def _new_state(d: Described, names: tuple[str, ...]) -> dict[str, Tensor]:
    parameter = d.parameter.detach()
    if not parameter.is_contiguous():
        raise UsageError(f"{d.name} is not contiguous: make it so before building the optimiser")
    state = {"step": torch.zeros(d.experts, dtype=torch.int64)}
    for name in names:
        state[name] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    if parameter.dtype != torch.float32:
        state["master"] = parameter.to(torch.float32)
    return state


def _select(numbers: Numbers, chosen: np.ndarray) -> Numbers:
    return {name: value[chosen] if isinstance(value, np.ndarray) else value for name, value in numbers.items()}


def _check_group(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    if saved["rule"] != mine["rule"]:
        raise UsageError(f"the saved group {mine['name']} is moved by {saved['rule']}, this one by {mine['rule']}")
    if missing := sorted(set(mine) - set(saved)):
        raise UsageError(f"the saved group {mine['name']} lacks {', '.join(missing)}")
    for name, other in zip(mine["param_names"], saved["param_names"], strict=False):
        if name != other:
            raise UsageError(f"the saved group {mine['name']} has {other} where this one has {name}")
    if len(mine["param_names"]) != len(saved["param_names"]):
        counts = f"{len(saved['param_names'])} parameters, this one {len(mine['param_names'])}"
        raise UsageError(f"the saved group {mine['name']} has {counts}")


def _copies(d: Described, mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    if set(mine) != set(saved):
        raise UsageError(f"the saved state of {d.name} has {sorted(saved)}, this optimiser keeps {sorted(mine)}")
    for name, tensor in mine.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            found = f"{saved[name].dtype} {list(saved[name].shape)}"
            raise UsageError(f"the saved {name} of {d.name} is {found}, not {tensor.dtype} {list(tensor.shape)}")
    return [(mine[name], saved[name]) for name in mine]
