"""Softmax attention over given keys and values with a visibility mask: the arithmetic that all memories share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.reference import softmax_with_sinks
from plait.ops.spec import AttendSpec


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttendSpec,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale q k^T)) v (Vaswani et al. 2017) for q [B, H, T, dk], k [B, Hk, C, dk], v [B, Hk, C, dv].

    mask: bool, broadcastable to [B, 1, T, C], True where the key is visible; every row must see something.
    causal: T equals C and query t sees keys 0 .. t (instead of a mask). sinks: logits [H, T or 1] that take part in the
    softmax of their row, and have no value (Xiao et al. 2023). Returns [B, H, T, dv].
    """
    grouped = q.shape[1] != k.shape[1]
    if not spec.soft_cap and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=spec.scale, enable_gqa=grouped
        )
    if grouped:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * spec.scale
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = F.dropout(softmax_with_sinks(scores, sinks), dropout, training=dropout > 0).to(v.dtype)
    return torch.matmul(weights, v)


def visible(query_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """bool [..., T, C]: key at k is visible to the query at q iff 0 <= q - k, and q - k < window where window > 0."""
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    mask = distance >= 0
    return mask & (distance < window) if window else mask
