"""The reference of every operation, in torch, with autograd. What another implementation must equal.

Every function takes its tensor operands, then its weights, then its attributes by name, as a recording stores them.
Leading axes are free: [N, ...] in serving, [B, T, ...] in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.spec import RouterSpec


def _wide(x: Tensor) -> Tensor:
    """x in fp32, in which statistics and routing are computed; float64, of tests of arithmetic, stays."""
    return x if x.dtype == torch.float64 else x.float()


def embed(ids: Tensor, table: Tensor, *, scale: float = 1.0, round_scale: bool = False, offset: int = 0) -> Tensor:
    """Rows ids + offset of table [V, D] for ids [...], times scale; that first rounded to the table's dtype if
    round_scale."""
    x = F.embedding(ids + offset if offset else ids, table)
    if scale == 1.0:
        return x
    return x * (torch.tensor(scale, dtype=x.dtype) if round_scale else scale)


def positions(position: Tensor, *, inv_freq: Sequence[float], magnitude: float = 1.0) -> Tensor:
    """cos and sin of position * inv_freq, in fp32: positions [...] -> [..., 2, d/2]."""
    angle = position.unsqueeze(-1).float() * torch.tensor(inv_freq, dtype=torch.float32, device=position.device)
    table = torch.stack((angle.cos(), angle.sin()), dim=-2)
    return table if magnitude == 1.0 else table * magnitude


def positions_by_reach(
    position: Tensor,
    reach: Tensor,
    *,
    inv_freq: Sequence[float],
    long_inv_freq: Sequence[float],
    original: int,
    magnitude: float = 1.0,
    long_magnitude: float | None = None,
) -> Tensor:
    """`positions` with one of two tables: long_inv_freq where reach [...] exceeds `original` (Ding et al. 2024).

    reach: the most tokens that the token's sequence will have, so that all of its keys are of one kind. long_magnitude:
    of the long table; None: the same.
    """
    short = positions(position, inv_freq=inv_freq, magnitude=magnitude)
    long = positions(
        position, inv_freq=long_inv_freq, magnitude=magnitude if long_magnitude is None else long_magnitude
    )
    return torch.where((reach > original)[..., None, None], long, short)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times W [O, I] transposed, plus b [O]."""
    return F.linear(x, weight, bias)


def rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False, fp32_weight: bool = False
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last axis (Zhang and Sennrich 2019), statistics in fp32.

    unit_offset: times 1 + w. fp32_weight: multiplied in fp32 and then cast; otherwise cast and then multiplied.
    """
    if weight is not None and weight.ndim == 1 and x.dtype == weight.dtype == torch.float32 and not unit_offset:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = _wide(x)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(x.dtype)
    if fp32_weight:
        w = _wide(weight)
        return (wide * (1.0 + w if unit_offset else w)).to(x.dtype)
    return wide.to(x.dtype) * (1.0 + weight if unit_offset else weight)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, unit_offset: bool = False
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b over the last axis (Ba et al. 2016); w may have axes before it (heads).

    unit_offset: times 1 + w.
    """
    if weight is not None and unit_offset:
        weight = weight + 1.0
    if weight is not None and weight.ndim > 1:
        y = F.layer_norm(x.float(), (x.shape[-1],), None, None, eps) * weight.float()
        return (y if bias is None else y + bias.float()).to(x.dtype)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def head_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False, fp32_weight: bool = False
) -> Tensor:
    """RMS norm of every head of x [..., H, d] with one weight [d]."""
    return rms_norm(x, weight, eps=eps, unit_offset=unit_offset, fp32_weight=fp32_weight)


def rotate(
    x: Tensor, angles: Tensor, *, width: int, pairing: str = "halves", fp32: str = "nothing", start: int = 0
) -> Tensor:
    """Rotate pairs of `width` features of x [..., H, d], from `start` on, by angles [..., 2, width/2] (Su et al. 2021).

    pairing: feature i with i + width/2 ("halves"), or 2i with 2i + 1 ("adjacent"), counted from `start`. The rest is
    copied. fp32: see plait.ops.spec.RotaryFp32.
    """
    if fp32 != "tables":
        angles = angles.to(x.dtype)
    cos, sin = angles[..., None, 0, :], angles[..., None, 1, :]
    turning = x if width == x.shape[-1] else x[..., start : start + width]
    if fp32 != "nothing":
        turning = turning.float()
    if pairing == "halves":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    turned = turned.to(x.dtype)
    if width == x.shape[-1]:
        return turned
    return torch.cat((x[..., :start], turned, x[..., start + width :]), dim=-1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, layer: int, spec: Any, memory: Any
) -> Tensor:
    """Keys and values of a layer go into the memory, the queries attend to what it holds: [..., H, dk] -> [..., H, dv].

    sinks: a logit [H] of each head that takes part in its softmax and has no value.
    """
    return memory.attend_tensors(layer, q, k, v, spec, sinks)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [..., H, T, C] over their last axis, with one more logit sinks [H, T or 1] in a row's sum.

    A row then sums to less than 1: the rest is the sink's.
    """
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def attend_latent(
    q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, *, layer: int, spec: Any, memory: Any
) -> Tensor:
    """A layer's latent and rotary key go into the memory, the queries attend to what it holds: q [..., H, nope + rope],
    latent [..., r], k_rope [..., 1, rope], weight [H (nope + v), r] -> [..., H, v]. Both forms of `LatentSpec`."""
    return memory.attend_latent_tensors(layer, q, latent, k_rope, weight, spec)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def gate(x: Tensor, y: Tensor, *, kind: str, **numbers: float) -> Tensor:
    """act(x) * y (Shazeer 2020); x [..., 1] gates a whole row of y [..., D].

    numbers: alpha and limit of the kind "clamped_swiglu", of which y is a factor in its own way; no other has any.
    """
    if kind == "clamped_swiglu":
        return _clamped_swiglu(x, y, **numbers)
    return ACTIVATIONS[kind](x, **numbers) * y


def _clamped_swiglu(x: Tensor, y: Tensor, *, alpha: float, limit: float) -> Tensor:
    """g sigmoid(alpha g) (u + 1) with g = min(x, limit) and u = y limited to [-limit, limit] (gpt-oss)."""
    g, u = x.clamp(max=limit), y.clamp(-limit, limit)
    return (u + 1) * (g * torch.sigmoid(g * alpha))


def activate(x: Tensor, *, kind: str) -> Tensor:
    """act(x)."""
    return ACTIVATIONS[kind](x)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Huang and Schlag 2024: with p = softplus(alpha_p) and n = beta + softplus(alpha_n),

    p x^2 + beta x where x > 0, else n (expm1(min(x, eps)) - x) + beta x. Each weight is one number.
    """
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    negative = (torch.expm1(torch.min(x, eps)) - x) * n + beta * x
    return torch.where(x > 0, p * x * x + beta * x, negative)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """What is fp32 by its definition stays so where training multiplies in bf16 or fp16."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis, largest first, the lower index first among equals (which
    torch.topk does not promise)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, selection_bias: Tensor | None = None, *, spec: RouterSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose spec.top_k experts per token of x [..., D] by a router weight [E, D], bias [E] and selection bias [E].

    Returns ids int32 [..., k] in descending order of their selection scores, weights fp32 [..., k] and logits fp32
    [..., E]. All of it is computed in fp32, whatever the dtypes are (`RouterSpec` has the rules).
    """
    with _without_autocast(x.device.type):
        wide = _wide(x)
        logits = F.linear(wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype))
    if spec.scores == "sparse_mixer":
        ids, weights = _sparse_mixer(logits, spec.jitter)
        return ids.int(), weights * spec.scale if spec.scale != 1.0 else weights, logits
    if spec.scores == "topk_softmax":
        scores = logits
    else:
        scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
    with torch.no_grad():
        selection = scores if selection_bias is None else scores + selection_bias.float()
        eligible = _eligible(selection, spec) if spec.groups else None
        if eligible is not None:
            selection = selection.masked_fill(~eligible, 0.0 if spec.masked == "zero" else float("-inf"))
        ids = _largest(selection, spec.top_k)
    if eligible is not None and spec.masked == "zero":
        scores = scores.masked_fill(~eligible, 0.0)
    weights = scores.gather(-1, ids)
    if spec.scores == "topk_softmax":
        weights = weights.softmax(-1)
    if spec.renormalises:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=spec.least_sum) if spec.least_sum else total + 1e-20)
    if spec.scale != 1.0:
        weights = weights * spec.scale
    return ids.int(), weights, logits


def _sparse_mixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """The two largest logits [..., E], each weighted by its share in a softmax of its own (Liu et al. 2023, of a model
    that is not being trained): over itself and the others that come close to it, of the second without the first.

    Logit s is far from the largest one m where (m - s) / max(|s|, m) > 2 jitter. Returns ids and weights [..., 2].
    """
    ids, weights = [], []
    left = logits
    for _ in range(2):
        with torch.no_grad():
            chosen = _largest(left, 1)
            best = logits.gather(-1, chosen)
            far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        shares = left.masked_fill(far, float("-inf")).softmax(-1)
        ids.append(chosen)
        weights.append(shares.gather(-1, chosen))
        left = logits.scatter(-1, chosen, float("-inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1)


def _eligible(selection: Tensor, spec: RouterSpec) -> Tensor:
    """Which experts belong to the best groups: bool [..., E]."""
    grouped = selection.unflatten(-1, (spec.groups, -1))
    best = grouped.amax(-1) if spec.group_score == "best" else grouped.topk(2, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _largest(best, spec.top_groups), True)
    return chosen.unsqueeze(-1).expand(grouped.shape).flatten(-2)


def by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """The slots of ids int [N, k] sorted by expert, as int64 [N k], and how many each expert has, those of none first.

    Slot s is the choice s % k of token s // k; a negative id is none. An expert has its slots in order.
    """
    chosen = ids.reshape(-1)
    counts = torch.bincount(chosen.clamp(min=-1) + 1, minlength=num_experts + 1)
    return chosen.argsort(stable=True), counts.tolist()


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    kind: str,
    gated: bool = True,
    **numbers: float,
) -> Tensor:
    """Weighted sum of each token's experts: x [..., D], ids [..., k], weights fp32 [..., k] -> [..., D].

    gate_up: [E, 2F, D] with the gate's rows first (gated False: [E, F, D], up alone), its bias [E, 2F]; down: [E, D,
    F], its bias [E, D]. kind, numbers: as of `gate`. Tokens are sorted by expert, so that each expert runs once, on one
    slice; no token is dropped. An id of -1 is no expert and adds nothing: padding in training, which costs nothing so.
    The sum over k is made in fp32, in the order of `ids`.
    """
    k = ids.shape[-1]
    tokens = x.reshape(-1, x.shape[-1])
    order, (none, *counts) = by_expert(ids, len(gate_up))
    slices = tokens.index_select(0, order[none:] // k).split(counts)
    # One unbind for all experts: indexing each would give every one a gradient of the whole stack's size.
    stacks = [[None] * len(gate_up) if w is None else w.unbind(0) for w in (gate_up, gate_up_bias, down, down_bias)]
    parts = []
    for rows, w_in, b_in, w_out, b_out in zip(slices, *stacks, strict=True):
        if len(rows):
            hidden = F.linear(rows, w_in, b_in)
            if gated:
                first, second = hidden.chunk(2, dim=-1)
                hidden = gate(first, second, kind=kind, **numbers)
            else:
                hidden = activate(hidden, kind=kind)
            parts.append(F.linear(hidden, w_out, b_out))
    if not parts:
        return torch.zeros_like(x)
    if none:
        parts.insert(0, parts[0].new_zeros(none, x.shape[-1]))
    # Unbound for the same reason: of every choice that is indexed, the gradient would be one of all choices.
    choices = torch.cat(parts).index_select(0, order.argsort()).unflatten(0, (-1, k)).unbind(1)
    shares = weights.reshape(-1, k, 1).unbind(1)
    total = _wide(choices[0]) * shares[0]
    for choice, share in zip(choices[1:], shares[1:], strict=True):
        total = total + _wide(choice) * share
    return total.to(x.dtype).reshape(x.shape)


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


def logits(x: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., D] times the head [V, D] transposed, plus b [V], returned in fp32."""
    return F.linear(x, head, bias).float()


REFERENCE: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        embed,
        positions,
        positions_by_reach,
        linear,
        rms_norm,
        layer_norm,
        head_norm,
        rotate,
        attend,
        attend_latent,
        gate,
        activate,
        xielu,
        route,
        experts,
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
