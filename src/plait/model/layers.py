"""The parts of a decoder layer. Each reads its own switches and speaks the operations; none knows a family."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plait.memory.base import MemoryStep
from plait.model.config import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from plait.ops import functional as ops


class Linear(nn.Linear):
    """x [..., I] -> [..., O]; parameters weight [O, I] and, where the switch says so, bias [O]."""

    def forward(self, x: Any) -> Any:
        return ops.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """An RMS or layer norm over the last axis; per_head marks q/k norms, which run on every head."""

    def __init__(self, spec: NormSpec, width: int, per_head: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.per_head = per_head
        self.weight = nn.Parameter(torch.ones(width)) if spec.weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if spec.bias else None

    def forward(self, x: Any) -> Any:
        s = self.spec
        if s.kind == "layer":
            return ops.layer_norm(x, self.weight, self.bias, eps=s.eps)
        norm = ops.head_norm if self.per_head else ops.rms_norm
        return norm(x, self.weight, eps=s.eps, unit_offset=s.unit_offset, fp32_weight=s.fp32_weight)


class Attention(nn.Module):
    """Grouped-query attention: project, norm, rotate, ask the memory, project back."""

    def __init__(self, spec: AttentionSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.attend = spec.attend
        q, k = spec.num_heads * spec.key_width, spec.num_kv_heads * spec.key_width
        v, o = spec.num_kv_heads * spec.value_width, spec.num_heads * spec.value_width
        self.q_proj = Linear(hidden_size, q, bias=spec.q_bias)
        self.k_proj = Linear(hidden_size, k, bias=spec.k_bias)
        self.v_proj = Linear(hidden_size, v, bias=spec.v_bias)
        self.o_proj = Linear(o, hidden_size, bias=spec.o_bias)
        if spec.head_norm is not None:
            self.q_norm = Norm(spec.head_norm, spec.key_width, per_head=True)
            self.k_norm = Norm(spec.head_norm, spec.key_width, per_head=True)

    def forward(self, x: Any, layer: int, angles: list[Any], memory: MemoryStep) -> Any:
        """x [..., D]; angles: per rotary table [..., 2, d/2]."""
        s = self.spec
        q = ops.view(self.q_proj(x), tail=(s.num_heads, s.key_width))
        k = ops.view(self.k_proj(x), tail=(s.num_kv_heads, s.key_width))
        v = ops.view(self.v_proj(x), tail=(s.num_kv_heads, s.value_width))
        if s.head_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if s.rotary is not None:
            turn = angles[s.rotary.table]
            q = ops.rotate(q, turn, width=s.rotary.width, pairing=s.rotary.pairing)
            k = ops.rotate(k, turn, width=s.rotary.width, pairing=s.rotary.pairing)
        heads = memory.attend(layer, q, k, v, self.attend)
        return self.o_proj(ops.view(heads, tail=(s.num_heads * s.value_width,), drop=2))


class FeedForward(nn.Module):
    """Gated or plain feed-forward."""

    def __init__(self, spec: FeedForwardSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        if spec.gated:
            self.gate_proj = Linear(hidden_size, spec.width, bias=spec.up_bias)
        self.up_proj = Linear(hidden_size, spec.width, bias=spec.up_bias)
        self.down_proj = Linear(spec.width, hidden_size, bias=spec.down_bias)

    def forward(self, x: Any) -> Any:
        kind = self.spec.activation
        if self.spec.gated:
            return self.down_proj(ops.gate(self.gate_proj(x), self.up_proj(x), kind=kind))
        return self.down_proj(ops.activate(self.up_proj(x), kind=kind))


class Layer(nn.Module):
    """One decoder layer; norms are named as in the Llama family, those after a branch as in GLM."""

    def __init__(self, spec: LayerSpec, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.spec = spec
        self.dropout = dropout
        self.self_attn = Attention(spec.attention, hidden_size)
        self.mlp = FeedForward(spec.feed_forward, hidden_size)
        self.input_layernorm = _norm(spec.pre_attention_norm, hidden_size)
        self.post_attention_layernorm = _norm(spec.pre_feed_forward_norm, hidden_size)
        self.post_self_attn_layernorm = _norm(spec.post_attention_norm, hidden_size)
        self.post_mlp_layernorm = _norm(spec.post_feed_forward_norm, hidden_size)

    def forward(self, x: Any, layer: int, angles: list[Any], memory: MemoryStep) -> Any:
        """x [..., D] -> [..., D]."""
        attended = self._branch(
            self.self_attn(_apply(self.input_layernorm, x), layer, angles, memory), self.post_self_attn_layernorm
        )
        if self.spec.parallel:
            fed = self._branch(self.mlp(_apply(self.post_attention_layernorm, x)), self.post_mlp_layernorm)
            return ops.add(ops.add(fed, attended), x)
        x = ops.add(x, attended)
        fed = self._branch(self.mlp(_apply(self.post_attention_layernorm, x)), self.post_mlp_layernorm)
        return ops.add(x, fed)

    def _branch(self, y: Any, norm: Norm | None) -> Any:
        y = _apply(norm, y)
        return ops.dropout(y, p=self.dropout) if self.training and self.dropout else y


def _norm(spec: NormSpec | None, width: int) -> Norm | None:
    return None if spec is None else Norm(spec, width)


def _apply(norm: Norm | None, x: Any) -> Any:
    return x if norm is None else norm(x)
