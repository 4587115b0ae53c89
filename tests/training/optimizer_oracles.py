"""The optimisers as their papers write them: one tensor at a time, in float64, with a scripted run to compare on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.training.roles import DECAYED, Described, describe_parameters
from tests.configs import CONFIGS

STEPS = 20


def adamw(p: Tensor, g: Tensor, s: dict[str, Any], h: dict[str, Any]) -> None:
    b1, b2 = h["betas"]
    s["t"] = s.get("t", 0) + 1
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    p *= 1 - h["lr"] * h["weight_decay"]
    p -= h["lr"] * (s["m"] / (1 - b1 ** s["t"])) / ((s["v"] / (1 - b2 ** s["t"])).sqrt() + h["eps"])


def mars(p: Tensor, g: Tensor, s: dict[str, Any], h: dict[str, Any]) -> None:
    b1 = h["betas"][0]
    c = g + h["gamma"] * b1 / (1 - b1) * (g - s.get("g", g))
    if c.norm() > 1:
        c = c / c.norm()
    s["g"] = g.clone()
    adamw(p, c, s, h)


def lion(p: Tensor, g: Tensor, s: dict[str, Any], h: dict[str, Any]) -> None:
    b1, b2 = h["betas"]
    m = s.get("m", torch.zeros_like(p))
    p *= 1 - h["lr"] * h["weight_decay"]
    p -= h["lr"] * torch.sign(b1 * m + (1 - b1) * g)
    s["m"] = b2 * m + (1 - b2) * g


def sophia(p: Tensor, g: Tensor, s: dict[str, Any], h: dict[str, Any]) -> None:
    b1 = h["betas"][0]
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    curvature = s.get("h", torch.zeros_like(p))
    p *= 1 - h["lr"] * h["weight_decay"]
    ratio = s["m"].abs() / (h["rho"] * h["bs"] * curvature + h["eps"])
    s["unclipped"] = int((ratio < 1).sum())
    p -= h["lr"] * torch.sign(s["m"]) * torch.minimum(ratio, torch.ones_like(ratio))


def sophia_refresh(g: Tensor, s: dict[str, Any], h: dict[str, Any]) -> None:
    b2 = h["betas"][1]
    s["h"] = b2 * s.get("h", torch.zeros_like(g)) + (1 - b2) * g * g


def newton_schulz(x: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, steps).T
    x = x / x.norm()
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon(p: Tensor, g: Tensor, s: dict[str, Any], h: dict[str, Any]) -> None:
    mu = h["momentum"]
    s["b"] = mu * s.get("b", torch.zeros_like(p)) + g
    x = g + mu * s["b"] if h["nesterov"] else s["b"]
    rows, columns = p.shape
    scale = max(1, rows / columns) ** 0.5 if h["scale"] == "original" else 0.2 * max(rows, columns) ** 0.5
    p *= 1 - h["lr"] * h["weight_decay"]
    p -= h["lr"] * scale * newton_schulz(x, h["steps"])


RuleFunction = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None]


@dataclass
class Piece:
    """A stretch of a parameter that goes its own way: a whole parameter, or one matrix of a stack."""

    described: Described
    number: int  # among the parameter's pieces
    expert: int
    shape: tuple[int, ...]
    value: Tensor  # float64
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def decays(self) -> bool:
        return self.described.role in DECAYED

    def cut(self, tensor: Tensor) -> Tensor:
        """Its own part of a tensor of the parameter's shape."""
        pieces = max(self.described.matrices, self.described.experts)
        return tensor.detach().reshape(pieces, *self.shape)[self.number]


def cut_pieces(decoder: nn.Module) -> list[Piece]:
    """Every trainable parameter, stacks by expert and by matrix, as independent float64 tensors."""
    found = []
    for d in describe_parameters(decoder):
        if not d.parameter.requires_grad:
            continue
        pieces = max(d.matrices, d.experts)
        shape = tuple(d.parameter.shape)
        if d.role == "expert_stack":
            shape = (d.parameter.numel() // pieces // shape[-1], shape[-1])
        elif d.experts > 1:
            shape = (d.parameter.numel() // pieces,)
        for number in range(pieces):
            piece = Piece(d, number, number * d.experts // pieces, shape, torch.zeros(()))
            piece.value = piece.cut(d.parameter).double().clone()
            found.append(piece)
    return found


def make_decoder() -> nn.Module:
    """Experts with biases, sinks, norms, an untied head: a tensor of every kind; uneven sizes. Nothing is zero, so that
    the size of an error can be compared with the parameter's."""
    decoder = plait.from_config({**CONFIGS["gpt_oss"], "num_hidden_layers": 2, "intermediate_size": 21}, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return decoder


def script(
    decoder: nn.Module, idle: bool = True, size: float = 0.3, steps: int = STEPS, least: float = 0.0
) -> Iterator[int]:
    """Gradients of a run: before every step they are set, and with `idle` some experts are without a token.

    Yields the number of the step, from 0. Gradients are partly the same from step to step, as in training. least: a
    distance from zero that all numbers keep, in deviations.
    """
    generator = torch.Generator().manual_seed(7)
    described = describe_parameters(decoder)
    drift = {d.name: torch.randn(d.parameter.shape, generator=generator) for d in described}
    for step in range(steps):
        experts = max(d.experts for d in described)
        active = torch.rand(experts, generator=generator) > 0.4
        for d in described:
            noise = torch.randn(d.parameter.shape, generator=generator)
            gradient = 0.5 * drift[d.name] + noise
            gradient = (gradient + least * gradient.sign()) * size * (1 + step % 3) / d.parameter.numel() ** 0.5
            d.parameter.grad = gradient.to(d.parameter.dtype)
            if d.experts > 1 and idle:
                d.parameter.active_experts = active
                d.parameter.grad[~active] = 0
        yield step


def is_active(piece: Piece) -> bool:
    active = getattr(piece.described.parameter, "active_experts", None)
    return active is None or piece.described.experts == 1 or bool(active[piece.expert])


def difference(piece: Piece, expected: Tensor | None = None) -> float:
    """Norm of the difference over norm of the parameter."""
    ours = piece.cut(piece.described.parameter).double()
    theirs = piece.value if expected is None else expected.detach().double()
    return float((ours - theirs).norm() / theirs.norm())
