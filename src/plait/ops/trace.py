"""Runs one text through a recording and keeps what a reader wants to see of it: norms, and what attention looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.ops.interpreter import Interpreter
from plait.ops.recording import Op, Recording
from plait.ops.reference import softmax_with_sinks
from plait.ops.spec import AttendSpec, LatentSpec

LARGEST = 5


def trace(recording: Recording, weights: Mapping[str, Tensor], ids: Tensor, memory: Any) -> dict[str, Any]:
    """What each operation gave for ids int64 [N], run as one sequence.

    memory: a step over `ids` of a memory that keeps nothing. Returns {"operations": rows, "logits": fp32 [V] of the
    last
    token}. A row has op, layer, shapes, rms (root mean square) and max (largest magnitude) of its first output; an
    `attend` or `attend_latent` also has `attention`: the largest weights of the last token, as (head, key position,
    weight).
    """
    rows: list[dict[str, Any]] = []

    def observe(op: Op, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        first = outputs[0].float()
        row = {
            "op": op.name,
            "layer": op.attrs.get("layer"),
            "weight": next((ref.name for ref in op.weights if ref is not None), None),
            "shapes": [list(out.shape) for out in outputs],
            "rms": first.square().mean().sqrt().item(),
            "max": first.abs().max().item(),
        }
        if op.name == "attend":
            q, k, _ = inputs
            sinks = weights[op.weights[0].name] if op.weights and op.weights[0] is not None else None
            shares = attention_weights(q, k, AttendSpec(**op.attrs["spec"]), sinks)
            row["attention"] = largest_weights(shares[:, -1])
        if op.name == "attend_latent":
            (ref,), latent = op.weights, LatentSpec(**op.attrs["spec"])
            assert ref is not None
            q, c, k_rope = inputs
            k = expanded_keys(c, k_rope, weights[ref.name], latent)
            row["attention"] = largest_weights(attention_weights(q, k, latent.expanded)[:, -1])
        rows.append(row)

    last = torch.tensor([len(ids) - 1], device=ids.device)
    inputs = {"ids": ids, "positions": memory.positions, "logit_rows": last}
    if "reach" in recording.inputs:
        inputs["reach"] = memory.reach
    with torch.inference_mode():
        outputs = Interpreter(recording, weights).run(inputs, memory, observe)
    return {"operations": rows, "logits": outputs["logits"][0]}


def attention_weights(q: Tensor, k: Tensor, spec: AttendSpec, sinks: Tensor | None = None) -> Tensor:
    """softmax(cap(scale q k^T)) of one sequence in fp32: q [N, H, d], k [N, Hk, d], sinks [H] -> [H, N, N].

    The reference form, apart from the implementation that ran: causal, 0 <= q - k < window.
    """
    k = k.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * spec.scale
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    position = torch.arange(len(q), device=q.device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    if spec.window:
        visible &= distance < spec.window
    scores = scores.masked_fill(~visible, float("-inf"))
    return softmax_with_sinks(scores, None if sinks is None else sinks.unsqueeze(-1))


def expanded_keys(latent: Tensor, k_rope: Tensor, weight: Tensor, spec: LatentSpec) -> Tensor:
    """Every head's keys [W_uk c ; k_rope] in fp32, [N, H, nope + rope].

    latent: [N, r], k_rope: [N, 1, rope], weight: [H (nope + v), r].
    """
    w_uk = weight.float().unflatten(0, (spec.num_heads, -1))[:, : spec.nope_width]
    k_nope = torch.einsum("nr,hkr->nhk", latent.float(), w_uk)
    return torch.cat((k_nope, k_rope.float().expand(-1, spec.num_heads, -1)), dim=-1)


def largest_weights(weights: Tensor, count: int = LARGEST) -> list[list[float]]:
    """[head, key position, weight] of the largest of weights [H, N], largest first."""
    values, where = weights.flatten().topk(min(count, weights.numel()))
    heads, keys = where // weights.shape[1], where % weights.shape[1]
    return [[int(h), int(k), float(w)] for h, k, w in zip(heads, keys, values, strict=True)]
