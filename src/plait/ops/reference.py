"""The reference of every operation, in torch, with autograd. What another implementation must equal.

Every function takes its tensor operands, then its weights, then its attributes by name, as a recording stores them.
Leading axes are free: [N, ...] in serving, [B, T, ...] in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(ids: Tensor, table: Tensor, *, scale: float = 1.0, round_scale: bool = False) -> Tensor:
    """Rows of table [V, D] for ids [...]; times scale, first rounded to the table's dtype if round_scale."""
    x = F.embedding(ids, table)
    if scale == 1.0:
        return x
    return x * (torch.tensor(scale, dtype=x.dtype) if round_scale else scale)


def positions(position: Tensor, *, inv_freq: Sequence[float], magnitude: float = 1.0) -> Tensor:
    """cos and sin of position * inv_freq, in fp32: positions [...] -> [..., 2, d/2]."""
    angle = position.unsqueeze(-1).float() * torch.tensor(inv_freq, dtype=torch.float32, device=position.device)
    table = torch.stack((angle.cos(), angle.sin()), dim=-2)
    return table if magnitude == 1.0 else table * magnitude


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times W [O, I] transposed, plus b [O]."""
    return F.linear(x, weight, bias)


def rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False, fp32_weight: bool = False
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last axis (Zhang and Sennrich 2019), statistics in fp32.

    unit_offset: times 1 + w. fp32_weight: multiplied in fp32 and then cast; otherwise cast and then multiplied.
    """
    if weight is not None and x.dtype == weight.dtype == torch.float32 and not unit_offset:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(x.dtype)
    if fp32_weight:
        w = weight.float()
        return (wide * (1.0 + w if unit_offset else w)).to(x.dtype)
    return wide.to(x.dtype) * (1.0 + weight if unit_offset else weight)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b over the last axis (Ba et al. 2016)."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def head_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False, fp32_weight: bool = False
) -> Tensor:
    """RMS norm of every head of x [..., H, d] with one weight [d]."""
    return rms_norm(x, weight, eps=eps, unit_offset=unit_offset, fp32_weight=fp32_weight)


def rotate(x: Tensor, angles: Tensor, *, width: int, pairing: str = "halves") -> Tensor:
    """Rotate pairs of the first `width` features of x [..., H, d] by angles [..., 2, width/2] (Su et al. 2021).

    pairing: feature i with i + width/2 ("halves"), or 2i with 2i + 1 ("adjacent"). The rest is copied.
    """
    angles = angles.to(x.dtype)
    cos, sin = angles[..., None, 0, :], angles[..., None, 1, :]
    turning = x if width == x.shape[-1] else x[..., :width]
    if pairing == "halves":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, layer: int, spec: Any, memory: Any) -> Tensor:
    """Keys and values of a layer go into the memory, the queries attend to what it holds: [..., H, dk] -> [..., H,
    dv]."""
    return memory.attend_tensors(layer, q, k, v, spec)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def gate(x: Tensor, y: Tensor, *, kind: str) -> Tensor:
    """act(x) * y (Shazeer 2020)."""
    return ACTIVATIONS[kind](x) * y


def activate(x: Tensor, *, kind: str) -> Tensor:
    """act(x)."""
    return ACTIVATIONS[kind](x)


def dropout(x: Tensor, *, p: float) -> Tensor:
    """Zero each number with probability p and scale the rest by 1 / (1 - p)."""
    return F.dropout(x, p)


_DTYPES = {"f32": torch.float32}


def cast(x: Tensor, *, dtype: str) -> Tensor:
    """x in another dtype."""
    return x.to(_DTYPES[dtype])


def view(x: Tensor, *, tail: Sequence[int], drop: int = 1) -> Tensor:
    """The last `drop` axes of x reshaped to `tail`."""
    return x.reshape(*x.shape[: x.ndim - drop], *tail)


def split(x: Tensor, *, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The last axis cut into consecutive parts."""
    return x.split(list(sizes), dim=-1)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def scale(x: Tensor, *, factor: float) -> Tensor:
    return x * factor


def soft_cap(x: Tensor, *, limit: float) -> Tensor:
    """limit * tanh(x / limit)."""
    return torch.tanh(x / limit) * limit


def clip(x: Tensor, *, limit: float) -> Tensor:
    return x.clamp(-limit, limit)


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [N, D] at rows [R]."""
    return x.index_select(0, rows)


def logits(x: Tensor, head: Tensor) -> Tensor:
    """x [..., D] times the head [V, D] transposed, returned in fp32."""
    return F.linear(x, head).float()


REFERENCE: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        embed,
        positions,
        linear,
        rms_norm,
        layer_norm,
        head_norm,
        rotate,
        attend,
        gate,
        activate,
        dropout,
        cast,
        view,
        split,
        add,
        scale,
        soft_cap,
        clip,
        select_rows,
        logits,
    )
}
