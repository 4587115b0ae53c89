"""The oracle of plait_gpt, which no other program has: the model as its specification states it, in plain torch.

Nothing here comes from plait. Every token goes through every expert, and a matrix of weights [T, E] adds them up; heads
rotate as complex numbers; attention is a softmax over a masked square. It computes in the dtype of its parameters, so
that it is also a float64 reference. What the parity tests ask of a model of the transformers library, it answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


class Matrix(nn.Module):
    """One weight under the name that files have it by."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), with the exact normal distribution."""
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


class FeedForward(nn.Module):
    def __init__(self, d: int, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = Matrix(width, d), Matrix(d, width)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x @ self.up_proj.weight.T) @ self.down_proj.weight.T


class Stacks(nn.Module):
    """The routed experts' matrices, under the names that files have them by."""

    def __init__(self, experts: int, d: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, width, d))
        self.down_proj = nn.Parameter(torch.empty(experts, d, width))


class Gate(Matrix):
    def __init__(self, experts: int, d: int, selection_bias: bool) -> None:
        super().__init__(experts, d)
        if selection_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Mixture(nn.Module):
    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        d, width = raw["d_model"], raw["d_expert"]
        self.top_k, shared = raw.get("top_k", 1), raw.get("n_shared", 0)
        self.gate = Gate(raw["n_experts"], d, raw.get("selection_bias", False))
        self.experts = Stacks(raw["n_experts"], d, width)
        self.shared_experts = FeedForward(d, shared * width) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(x @ self.gate.weight.T, -1)
        selection = p + getattr(self.gate, "e_score_correction_bias", 0.0)
        chosen = torch.zeros_like(p).scatter(-1, selection.topk(self.top_k).indices, 1.0)
        weights = p * chosen
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        inner = gelu(torch.einsum("btd,efd->btef", x, self.experts.gate_up_proj))
        y = torch.einsum("bte,btef,edf->btd", weights, inner, self.experts.down_proj)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class Attention(nn.Module):
    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        d = raw["d_model"]
        self.heads, self.base = raw["n_heads"], raw.get("rope_base", 10_000.0)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Matrix(d, d) for _ in range(4))

    def rotate(self, x: Tensor) -> Tensor:
        """Feature i of a head turns with feature i + d/2, by the angle position * base^(-2i/d)."""
        length, width = x.shape[-2:]
        frequency = self.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :])
        turned = pairs * torch.polar(torch.ones_like(angle), angle).to(pairs.dtype)
        return torch.cat((turned.real, turned.imag), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            (x @ each.weight.T).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = self.rotate(q) @ self.rotate(k).mT / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return y.transpose(1, 2).flatten(2) @ self.o_proj.weight.T


class Layer(nn.Module):
    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        d = raw["d_model"]
        self.self_attn = Attention(raw)
        self.mlp = Mixture(raw) if raw.get("use_moe") else FeedForward(d, raw["d_ff"])
        self.input_layernorm, self.post_attention_layernorm = Norm(d), Norm(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = Matrix(raw["vocab_size"], raw["d_model"])
        self.layers = nn.ModuleList(Layer(raw) for _ in range(raw["n_layers"]))
        self.norm = Norm(raw["d_model"])


class PlaitGPT(nn.Module):
    """raw: a config.json of the family."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self.raw = raw
        tied = raw.get("tie_embeddings", True)
        self.config = SimpleNamespace(model_type=raw["model_type"], tie_word_embeddings=tied)
        self.model = Backbone(raw)
        self.lm_head = self.model.embed_tokens if tied else Matrix(raw["vocab_size"], raw["d_model"])

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """int64 [B, T] -> logits [B, T, V]."""
        x = self.model.embed_tokens.weight[input_ids]
        for layer in self.model.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.model.norm(x) @ self.lm_head.weight.T)

    def get_input_embeddings(self) -> Matrix:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Matrix:
        return self.lm_head

    def generate(self, ids: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        """The most likely token, over and over."""
        for _ in range(max_new_tokens):
            ids = torch.cat((ids, self(ids).logits[:, -1:].argmax(-1)), -1)
        return ids

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if self.config.tie_word_embeddings:
            del state["lm_head.weight"]
        save_file(state, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.raw))
