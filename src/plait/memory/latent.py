"""Latent attention over given rows [c ; k_rope], in its two equal forms: the arithmetic that all memories share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.memory.attention import masked_attention
from plait.ops.spec import LatentSpec


def latent_rows(latent: Tensor, k_rope: Tensor) -> Tensor:
    """What a memory keeps of each token: latent [..., r] and k_rope [..., 1, rope] -> [..., r + rope]."""
    return torch.cat((latent, k_rope.flatten(-2)), dim=-1)


def latent_attention(
    q: Tensor,
    rows: Tensor,
    weight: Tensor,
    spec: LatentSpec,
    expanded: bool,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of q [B, H, T, nope + rope] over rows [B, C, r + rope] with weight [H (nope + v), r] -> [B, H, T, v].

    expanded: which form of `LatentSpec`. mask, causal: as in `masked_attention`.
    """
    form = _expanded if expanded else _absorbed
    return form(q, rows, weight, spec, mask, causal, dropout)


def _expanded(
    q: Tensor, rows: Tensor, weight: Tensor, spec: LatentSpec, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """k_h = [W_uk,h c ; k_rope], v_h = W_uv,h c."""
    latent, k_rope = rows.split((spec.latent_width, spec.rope_width), dim=-1)
    made = F.linear(latent, weight).unflatten(-1, (spec.num_heads, -1)).transpose(1, 2)
    k_nope, v = made.split((spec.nope_width, spec.value_width), dim=-1)
    k = torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, spec.num_heads, -1, -1)), dim=-1)
    return masked_attention(q, k, v, spec.expanded, mask, causal, dropout)


def _absorbed(
    q: Tensor, rows: Tensor, weight: Tensor, spec: LatentSpec, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """q~_h = W_uk,h^T q_nope,h; one key/value head, whose values are the first r features of its keys; W_uv,h of the
    result."""
    w_uk, w_uv = weight.unflatten(0, (spec.num_heads, -1)).split((spec.nope_width, spec.value_width), dim=1)
    q_nope, q_rope = q.split((spec.nope_width, spec.rope_width), dim=-1)
    query = torch.cat((torch.matmul(q_nope, w_uk), q_rope), dim=-1)
    keys = rows.unsqueeze(1)
    values = keys[..., : spec.latent_width]
    single = q.shape[2] == 1
    if single:
        # The heads of a single query stand where several queries would, so each row is read once for all of them.
        query, causal = query.transpose(1, 2), False
    heads = masked_attention(query, keys, values, spec.absorbed, mask, causal, dropout)
    if single:
        heads = heads.transpose(1, 2)
    return torch.matmul(heads, w_uv.transpose(1, 2))
