"""The optimisers against public implementations, to which every matrix of a stack is a parameter of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import sophia_opt
import torch
from torch import Tensor, nn

import plait
from plait.training.optimizers import build_optimizer
from plait.training.roles import describe_parameters
from tests.configs import CONFIGS
from tests.training.optimizer_oracles import Piece, cut_pieces, difference, is_active, make_decoder, script
from tests.training.test_optimizers import kernels

__all__ = ["kernels"]  # a fixture


class Public:
    """A public optimiser over the pieces of a decoder."""

    def __init__(self, pieces: list[Piece], make: Callable[..., torch.optim.Optimizer], decay: float) -> None:
        self.pieces = pieces
        self.parameters = [nn.Parameter(piece.value.float()) for piece in pieces]
        pairs = list(zip(pieces, self.parameters, strict=True))
        groups = [
            {"params": [p for piece, p in pairs if piece.decays], "weight_decay": decay},
            {"params": [p for piece, p in pairs if not piece.decays], "weight_decay": 0.0},
        ]
        self.optimizer = make([group for group in groups if group["params"]])

    def take_gradients(self) -> None:
        """Copies: a public step may write into them. None for a piece without a token."""
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            gradient = piece.cut(piece.described.parameter.grad)
            parameter.grad = gradient.clone() if is_active(piece) else None

    def check(self, allowed: float) -> None:
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            assert difference(piece, parameter) < allowed, f"{piece.described.name} piece {piece.number}"


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}], ids=str)
def test_adamw_is_torchs(kernels: str, how: dict[str, Any]) -> None:
    decoder = make_decoder()
    numbers = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    public = Public(cut_pieces(decoder), lambda groups: torch.optim.AdamW(groups, **numbers, **how), 0.2)
    optimizer = build_optimizer("adamw", decoder, **numbers, weight_decay=0.2)
    for _ in script(decoder):
        public.take_gradients()
        public.optimizer.step()
        optimizer.step()
    public.check(1e-6)


def test_lion_is_lion_pytorchs(kernels: str) -> None:
    decoder = make_decoder()
    numbers = {"lr": 1e-3, "betas": (0.9, 0.99)}
    public = Public(cut_pieces(decoder), lambda groups: lion_pytorch.Lion(groups, **numbers), 0.3)
    optimizer = build_optimizer("lion", decoder, **numbers, weight_decay=0.3)
    for _ in script(decoder):
        public.take_gradients()
        public.optimizer.step()
        optimizer.step()
    public.check(1e-5)


def test_mars_is_pytorch_optimizers(kernels: str) -> None:
    """It counts steps per group, so all experts are busy here; its first c is not g unless last_grad says so, which is
    there before the first step only where the state is filled by hand. Its eps stands inside the bias correction, and
    another one inside the root: gradients keep away from zero, where that shows."""
    decoder = make_decoder()
    numbers = {"lr": 3e-3, "betas": (0.95, 0.99), "gamma": 0.025, "eps": 1e-8}

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for group in groups:
            group["weight_decay_1d"] = group["weight_decay"]
        return pytorch_optimizer.MARS(groups, **numbers, lr_1d=3e-3, betas_1d=(0.95, 0.99))

    public = Public(cut_pieces(decoder), make, 0.2)
    optimizer = build_optimizer("mars", decoder, **numbers, weight_decay=0.2)
    for step in script(decoder, idle=False, least=0.1):
        public.take_gradients()
        if step == 0:
            for p in public.parameters:
                zero = torch.zeros_like(p)
                public.optimizer.state[p] = {"exp_avg": zero, "exp_avg_sq": zero.clone(), "last_grad": p.grad.clone()}
        public.optimizer.step()
        optimizer.step()
    public.check(1e-5)


def test_sophia_is_sophia_opts(kernels: str) -> None:
    decoder = make_decoder()
    numbers = {"lr": 1e-3, "betas": (0.965, 0.99), "rho": 0.04}
    public = Public(cut_pieces(decoder), lambda groups: sophia_opt.SophiaG(groups, **numbers), 0.2)
    optimizer = build_optimizer("sophia", decoder, **numbers, weight_decay=0.2, hessian_interval=4)
    for step in script(decoder):
        public.take_gradients()
        public.optimizer.step(bs=5120)
        optimizer.step()
        if optimizer.wants_hessian(step + 1):
            public.optimizer.update_hessian()
            assert optimizer.update_hessian(5120)
    public.check(1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_is_torchs(kernels: str, scale: str, precision: str) -> None:
    """torch's products are in bfloat16 always."""
    decoder = make_decoder()
    matrices = [p for p in cut_pieces(decoder) if p.described.role in ("matrix", "expert_stack")]
    numbers = {"lr": 3e-3, "momentum": 0.95, "nesterov": True}
    public = Public(matrices, lambda groups: torch.optim.Muon(groups, **numbers, adjust_lr_fn=scale), 0.1)
    optimizer = build_optimizer("muon", decoder, **numbers, weight_decay=0.1, scale=scale, precision=precision)
    for _ in script(decoder):
        public.take_gradients()
        public.optimizer.step()
        optimizer.step()
    public.check(1e-2)


def test_stacks_train_as_their_experts_would_alone(kernels: str) -> None:
    """Ours on a stack against ours on the same numbers as separate matrices: bit for bit, idle experts included."""
    config = {**CONFIGS["qwen3_moe"], "num_hidden_layers": 1, "mlp_only_layers": []}
    for name in ("adamw", "mars", "lion", "sophia"):
        decoder = plait.from_config(config, seed=1)
        optimizer = build_optimizer(name, decoder)
        described = [d for d in describe_parameters(decoder) if d.role == "expert_stack"]
        alone = Alone(decoder, described[0].parameter)
        single = build_optimizer(name, alone)
        for _ in script(decoder, steps=6):
            alone.take(described[0].parameter)
            if name == "sophia":
                assert optimizer.update_hessian(50) and single.update_hessian(50)
            optimizer.step()
            single.step()
            assert torch.equal(alone.stacked(), described[0].parameter)


class Alone(nn.Module):
    """The matrices of a stack [E, 2F, D] as linear modules."""

    def __init__(self, decoder: Any, stack: Tensor) -> None:
        super().__init__()
        experts, rows, columns = stack.shape
        kind = type(decoder.model.layers[0].self_attn.q_proj)
        self.parts = nn.ModuleList(kind(columns, rows // 2, bias=False) for _ in range(2 * experts))
        for part, value in zip(self.parts, stack.detach().reshape(2 * experts, rows // 2, columns), strict=True):
            part.weight.data = value.clone()

    def take(self, stack: Any) -> None:
        for number, part in enumerate(self.parts):
            gradient = stack.grad.reshape(len(self.parts), *part.weight.shape)[number]
            part.weight.grad = gradient.clone() if stack.active_experts[number // 2] else None

    def stacked(self) -> Tensor:
        experts = len(self.parts) // 2
        return torch.stack([part.weight.detach() for part in self.parts]).reshape(
            experts, -1, self.parts[0].in_features
        )
