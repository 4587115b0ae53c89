"""Deliberate faults of latent attention, for tests/parity/mutations.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.model.config import LatentAttentionSpec, ModelConfig
from plait.ops.spec import Pairing

State = dict[str, Tensor]


def is_latent(c: ModelConfig) -> bool:
    return isinstance(c.layers[0].attention, LatentAttentionSpec)


def config_faults(c: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Wrong scales, pairs, biases and norms."""
    a = _first(c)
    yield "softmax scale x1.1", _attention(c, lambda a: replace(a, scale=a.scale * 1.1))
    plain = a.key_width**-0.5
    if abs(a.scale / plain - 1) > 1e-6:
        yield "softmax scale without mscale", _attention(c, lambda a: replace(a, scale=plain))
        yield (
            "mscale of the softmax scale not squared",
            _attention(c, lambda a: replace(a, scale=(a.scale * plain) ** 0.5)),
        )
    other: Pairing = "halves" if a.rotary.pairing == "adjacent" else "adjacent"
    yield f"pairs by {other}", _attention(c, lambda a: replace(a, rotary=replace(a.rotary, pairing=other)))
    if a.bias:
        yield "latent biases dropped", _attention(c, lambda a: replace(a, bias=False))
    if c.final_norm.eps >= 0.01:
        wrong = replace(a.inner_norm, eps=c.final_norm.eps)
        yield "inner norms with the configuration's eps", _attention(c, lambda a: replace(a, inner_norm=wrong))


def state_faults(c: ModelConfig, state: State) -> Iterator[tuple[str, ModelConfig, State]]:
    """Weights read in another order, norms at their default."""
    if not is_latent(c):
        return
    a = _first(c)
    for norm in ("q_a_layernorm", "kv_a_layernorm"):
        if norm == "kv_a_layernorm" or a.query_rank is not None:
            yield f"{norm} at its default", c, _changed(state, f"{norm}.weight", torch.ones_like)
    heads, made, rows = a.num_heads, (a.nope_width, a.value_width), (a.latent_width, a.rope_width)

    def all_keys_first(w: Tensor) -> Tensor:
        """As if the rows that make keys stood before all that make values."""
        return w.unflatten(0, (-1, heads)).transpose(0, 1).flatten(0, 1)

    def values_first(w: Tensor) -> Tensor:
        k, v = w.unflatten(0, (heads, -1)).split(made, dim=1)
        return torch.cat((v, k), dim=1).flatten(0, 1)

    yield "kv_b not head by head", c, _changed(state, "kv_b_proj.weight", all_keys_first)
    yield "kv_b with values before keys", c, _changed(state, "kv_b_proj.weight", values_first)
    yield (
        "kv_b heads in reverse order",
        c,
        _changed(state, "kv_b_proj.weight", lambda w: w.unflatten(0, (heads, -1)).flip(0).flatten(0, 1)),
    )
    yield (
        "rotary key before the latent",
        c,
        _changed(state, "kv_a_proj_with_mqa.weight", lambda w: torch.cat(w.split(rows)[::-1])),
    )
    q = "q_proj.weight" if a.query_rank is None else "q_b_proj.weight"
    widths = (a.nope_width, a.rope_width)
    yield (
        "queries rotate in front",
        c,
        _changed(
            state, q, lambda w: torch.cat(w.unflatten(0, (heads, -1)).split(widths, dim=1)[::-1], dim=1).flatten(0, 1)
        ),
    )


def _first(c: ModelConfig) -> LatentAttentionSpec:
    a = c.layers[0].attention
    assert isinstance(a, LatentAttentionSpec)
    return a


def _attention(c: ModelConfig, change: Callable[[LatentAttentionSpec], LatentAttentionSpec]) -> ModelConfig:
    layers: Any = (replace(layer, attention=change(layer.attention)) for layer in c.layers)  # type: ignore[arg-type]
    return replace(c, layers=tuple(layers))


def _changed(state: State, suffix: str, change: Callable[[Tensor], Tensor]) -> State:
    return {name: change(w) if name.endswith(suffix) else w for name, w in state.items()}
