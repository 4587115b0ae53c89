"""The parts of a decoder layer. Each reads its own switches and speaks the operations; none knows a family."""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log
from typing import Any

import torch
from torch import nn

from plait.memory.base import MemoryStep
from plait.model.config import (
    AttentionSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixtureSpec,
    NormSpec,
)
from plait.ops import functional as ops
from plait.ops.spec import RouterSpec


class Linear(nn.Linear):
    """x [..., I] -> [..., O]; parameters weight [O, I] and, where the switch says so, bias [O]."""

    def forward(self, x: Any) -> Any:
        return ops.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """An RMS or layer norm over the last axis; per_head marks q/k norms, which run on every head.

    shape: of the weight: the last axis, or [H, d] where every head has its own.
    """

    def __init__(self, spec: NormSpec, shape: int | tuple[int, ...], per_head: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.per_head = per_head
        self.weight = nn.Parameter(torch.ones(shape)) if spec.weight else None
        self.bias = nn.Parameter(torch.zeros(shape)) if spec.bias else None

    def forward(self, x: Any) -> Any:
        s = self.spec
        if s.kind == "layer":
            return ops.layer_norm(x, self.weight, self.bias, eps=s.eps, unit_offset=s.unit_offset)
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
            q_norm, k_norm = spec.head_norm_shapes
            per_head = spec.head_norm_over != "projection"
            self.q_norm = Norm(spec.head_norm, q_norm, per_head)
            self.k_norm = Norm(spec.head_norm, k_norm, per_head)
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if spec.sinks else None

    def forward(self, x: Any, layer: int, angles: list[Any], memory: MemoryStep) -> Any:
        """x [..., D]; angles: per rotary table [..., 2, d/2]."""
        s = self.spec
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if s.head_norm is not None and s.head_norm_over == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        if s.clip:
            q, k, v = (ops.clip(y, limit=s.clip) for y in (q, k, v))
        q = ops.view(q, tail=(s.num_heads, s.key_width))
        k = ops.view(k, tail=(s.num_kv_heads, s.key_width))
        v = ops.view(v, tail=(s.num_kv_heads, s.value_width))
        each_head = s.head_norm is not None and s.head_norm_over != "projection"
        if each_head and not s.head_norm_after_rotary:
            q, k = self.q_norm(q), self.k_norm(k)
        if s.rotary is not None:
            turn = angles[s.rotary.table]
            how = {"width": s.rotary.width, "pairing": s.rotary.pairing, "fp32": s.rotary.fp32}
            q, k = ops.rotate(q, turn, **how), ops.rotate(k, turn, **how)
        if each_head and s.head_norm_after_rotary:
            q, k = self.q_norm(q), self.k_norm(k)
        heads = memory.attend(layer, q, k, v, self.attend, self.sinks)
        return self.o_proj(ops.view(heads, tail=(s.num_heads * s.value_width,), drop=2))


class LatentAttention(nn.Module):
    """Attention over one latent and one rotary key per token, shared by all heads; modules as in DeepSeek's files."""

    def __init__(self, spec: LatentAttentionSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.attend = spec.attend
        queries, made = spec.num_heads * spec.key_width, spec.num_heads * (spec.nope_width + spec.value_width)
        if spec.query_rank is None:
            self.q_proj = Linear(hidden_size, queries, bias=False)
        else:
            self.q_a_proj = Linear(hidden_size, spec.query_rank, bias=spec.bias)
            self.q_a_layernorm = Norm(spec.inner_norm, spec.query_rank)
            self.q_b_proj = Linear(spec.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden_size, self.attend.row_width, bias=spec.bias)
        self.kv_a_layernorm = Norm(spec.inner_norm, spec.latent_width)
        self.kv_b_proj = Linear(spec.latent_width, made, bias=False)
        self.o_proj = Linear(spec.num_heads * spec.value_width, hidden_size, bias=spec.bias)

    def forward(self, x: Any, layer: int, angles: list[Any], memory: MemoryStep) -> Any:
        """x [..., D]; angles: per rotary table [..., 2, d/2]."""
        s = self.spec
        q = self.q_proj(x) if s.query_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = ops.view(q, tail=(s.num_heads, s.key_width))
        latent, k_rope = ops.split(self.kv_a_proj_with_mqa(x), sizes=(s.latent_width, s.rope_width))
        latent, k_rope = self.kv_a_layernorm(latent), ops.view(k_rope, tail=(1, s.rope_width))
        turn = angles[s.rotary.table]
        how = {"width": s.rotary.width, "pairing": s.rotary.pairing, "fp32": s.rotary.fp32}
        q, k_rope = ops.rotate(q, turn, start=s.nope_width, **how), ops.rotate(k_rope, turn, **how)
        heads = memory.attend_latent(layer, q, latent, k_rope, self.kv_b_proj.weight, self.attend)
        return self.o_proj(ops.view(heads, tail=(s.num_heads * s.value_width,), drop=2))


# The parameters of xIELU and what they are where nothing has been learned: softplus(alpha_p) = 0.8, beta +
# softplus(alpha_n) = 0.8.
XIELU_NUMBERS = {"alpha_p": log(expm1(0.8)), "alpha_n": log(expm1(0.3)), "beta": 0.5, "eps": -1e-6}


class XIELU(nn.Module):
    """xIELU with its four numbers, of which training moves two."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.ones(1))
        self.alpha_n = nn.Parameter(torch.ones(1))
        self.beta = nn.Parameter(torch.ones(()), requires_grad=False)
        self.eps = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return ops.xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


class FeedForward(nn.Module):
    """Gated or plain feed-forward."""

    def __init__(self, spec: FeedForwardSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        if spec.gated:
            self.gate_proj = Linear(hidden_size, spec.width, bias=spec.up_bias)
        self.up_proj = Linear(hidden_size, spec.width, bias=spec.up_bias)
        self.down_proj = Linear(spec.width, hidden_size, bias=spec.down_bias)
        self.act_fn = XIELU() if spec.activation == "xielu" else None

    def forward(self, x: Any) -> Any:
        kind = self.spec.activation
        if self.spec.gated:
            return self.down_proj(ops.gate(self.gate_proj(x), self.up_proj(x), kind=kind, **self.spec.numbers))
        if self.act_fn is not None:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        return self.down_proj(ops.activate(self.up_proj(x), kind=kind))


@dataclass(frozen=True)
class Routing:
    """What the router of one layer decided, for tokens of any leading shape.

    logits: fp32 [..., E]. ids: int32 [..., k], the experts of each token, best first; -1 at padding, which goes through
    none. weights: fp32 [..., k], 0 there. spec: by which rules.
    """

    logits: Any
    ids: Any
    weights: Any
    spec: RouterSpec


class Router(nn.Module):
    """Chooses the experts of every token. Its parameters are float32 whatever the model's dtype."""

    def __init__(self, spec: MixtureSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec.router
        experts = spec.router.num_experts
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(experts)) if spec.router_bias else None
        # Selection has no gradient: training moves this bias by a rule of its own.
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(experts), requires_grad=False) if spec.selection_bias else None
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What torch moves and casts a module with (`to`, `half`, ...): a router moves, and stays float32."""
        kept = {name: parameter.data for name, parameter in self.named_parameters()}
        super()._apply(fn, recurse)
        for name, parameter in self.named_parameters():
            if parameter.dtype != kept[name].dtype:
                parameter.data = kept[name].to(parameter.device)
        return self

    def forward(self, x: Any) -> Any:
        """x [..., D] -> ids [..., k], weights [..., k], logits [..., E]."""
        return ops.route(x, self.weight, self.bias, self.e_score_correction_bias, spec=self.spec)


class Experts(nn.Module):
    """All experts of a layer, stacked: gate_up_proj [E, 2F, D] (plain ones: [E, F, D]), down_proj [E, D, F]."""

    def __init__(self, spec: MixtureSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        experts, inner = spec.router.num_experts, spec.width * (2 if spec.gated else 1)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, inner, hidden_size))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, inner)) if spec.up_bias else None
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, spec.width))
        self.down_proj_bias = nn.Parameter(torch.zeros(experts, hidden_size)) if spec.down_bias else None

    def forward(self, x: Any, ids: Any, weights: Any) -> Any:
        """x [..., D], ids [..., k], weights [..., k] -> [..., D]."""
        stacks = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        s = self.spec
        return ops.experts(x, ids, weights, *stacks, kind=s.activation, gated=s.gated, **s.numbers)


class Mixture(nn.Module):
    """Routed experts, and beside them a feed-forward that every token goes through, where there is one."""

    def __init__(self, spec: MixtureSpec, hidden_size: int) -> None:
        super().__init__()
        self.gate = Router(spec, hidden_size)
        self.experts = Experts(spec, hidden_size)
        self.shared_experts: FeedForward | None = None
        self.shared_expert: FeedForward | None = None
        if spec.shared is not None and spec.shared_gate:
            self.shared_expert = FeedForward(spec.shared, hidden_size)
            self.shared_expert_gate = Linear(hidden_size, 1, bias=False)
        elif spec.shared is not None:
            self.shared_experts = FeedForward(spec.shared, hidden_size)

    def forward(self, x: Any, layer: int = 0, token_mask: Any = None, routing: dict[int, Routing] | None = None) -> Any:
        """x [..., D] -> [..., D]. token_mask: bool [...], False at padding; routing: where to keep what was decided."""
        ids, weights, logits = self.gate(x)
        if token_mask is not None:
            padding = ~token_mask.unsqueeze(-1)
            ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
        if routing is not None:
            routing[layer] = Routing(logits, ids, weights, self.gate.spec)
        y = self.experts(x, ids, weights)
        if self.shared_experts is not None:
            return ops.add(y, self.shared_experts(x))
        if self.shared_expert is not None:
            return ops.add(y, ops.gate(self.shared_expert_gate(x), self.shared_expert(x), kind="sigmoid"))
        return y


class Layer(nn.Module):
    """One decoder layer; norms are named as in the Llama family, those after a branch as in GLM."""

    def __init__(self, spec: LayerSpec, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.spec = spec
        self.dropout = dropout
        self.self_attn: Attention | LatentAttention
        if isinstance(spec.attention, LatentAttentionSpec):
            self.self_attn = LatentAttention(spec.attention, hidden_size)
        else:
            self.self_attn = Attention(spec.attention, hidden_size)
        ff = spec.feed_forward
        self.mlp = Mixture(ff, hidden_size) if isinstance(ff, MixtureSpec) else FeedForward(ff, hidden_size)
        self.input_layernorm = _norm(spec.pre_attention_norm, hidden_size)
        self.post_attention_layernorm = _norm(spec.pre_feed_forward_norm, hidden_size)
        self.post_self_attn_layernorm = _norm(spec.post_attention_norm, hidden_size)
        self.post_mlp_layernorm = _norm(spec.post_feed_forward_norm, hidden_size)

    def forward(
        self,
        x: Any,
        layer: int,
        angles: list[Any],
        memory: MemoryStep,
        token_mask: Any = None,
        routing: dict[int, Routing] | None = None,
    ) -> Any:
        """x [..., D] -> [..., D]. token_mask, routing: see `Mixture`."""

        def feed(y: Any) -> Any:
            return self.mlp(y, layer, token_mask, routing) if isinstance(self.mlp, Mixture) else self.mlp(y)

        read = _apply(self.input_layernorm, x)
        attended = self._branch(self.self_attn(read, layer, angles, memory), self.post_self_attn_layernorm)
        if self.spec.parallel:
            y = read if self.spec.shared_norm else _apply(self.post_attention_layernorm, x)
            fed = self._branch(feed(y), self.post_mlp_layernorm)
            if self.spec.residual_first:
                return ops.add(ops.add(x, attended), fed)
            return ops.add(ops.add(fed, attended), x)
        x = ops.add(x, attended)
        fed = self._branch(feed(_apply(self.post_attention_layernorm, x)), self.post_mlp_layernorm)
        return ops.add(x, fed)

    def _branch(self, y: Any, norm: Norm | None) -> Any:
        y = _apply(norm, y)
        if self.spec.branch_scale != 1.0:
            y = ops.scale(y, factor=self.spec.branch_scale)
        return ops.dropout(y, p=self.dropout) if self.training and self.dropout else y


def _norm(spec: NormSpec | None, width: int) -> Norm | None:
    return None if spec is None else Norm(spec, width)


def _apply(norm: Norm | None, x: Any) -> Any:
    return x if norm is None else norm(x)
