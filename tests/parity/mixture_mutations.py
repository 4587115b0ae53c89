"""Deliberate faults of mixtures of experts, for tests/parity/mutations.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from plait.model.config import MixtureSpec, ModelConfig
from plait.ops.spec import RouterSpec

State = dict[str, Tensor]


def mixtures(c: ModelConfig) -> list[MixtureSpec]:
    return [layer.feed_forward for layer in c.layers if isinstance(layer.feed_forward, MixtureSpec)]


def config_faults(c: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Wrong switches of the routers and of what is shared."""
    for first in mixtures(c)[:1]:
        r = first.router
        mixer = r.scores == "sparse_mixer"  # it takes two, and has no sum
        if r.top_k < r.num_experts and not mixer:
            yield "top-k + 1", _routers(c, top_k=r.top_k + 1)
        if r.top_k > 1 and not mixer:
            yield "top-k - 1", _routers(c, top_k=r.top_k - 1)
        if mixer:
            yield "jitter x1.1", _routers(c, jitter=1.1 * r.jitter)
            yield "softmax over the two", _routers(c, scores="topk_softmax")
        if first.router_bias:
            yield "router bias dropped", _mixtures(c, lambda m: replace(m, router_bias=False))
        if r.least_sum > 0.1:
            yield "no least sum", _routers(c, least_sum=0.0)
        if first.limit:
            yield "limit x1.1", _mixtures(c, lambda m: replace(m, limit=1.1 * m.limit))
            yield "alpha x1.1", _mixtures(c, lambda m: replace(m, alpha=1.1 * m.alpha))
        if r.scores != "topk_softmax" and not mixer:
            wrong = "never" if r.renormalises else "always"
            yield "renormalised, or no longer", _routers(c, renormalise=wrong)
        yield "routing scale x1.1", _routers(c, scale=r.scale * 1.1)
        other = "sigmoid" if r.scores == "softmax" else "softmax"
        if not (r.renormalises and r.top_k == 1):
            yield "other scores", _routers(c, scores=other)
        if r.groups:
            yield "no groups", _routers(c, groups=0)
            yield "groups by another score", _routers(c, group_score="best" if r.group_score != "best" else "two_best")
        if first.shared is not None:
            yield "shared expert dropped", _mixtures(c, lambda m: replace(m, shared=None, shared_gate=False))


def state_faults(c: ModelConfig, state: State) -> Iterator[tuple[str, ModelConfig, State]]:
    """Wrong weights, and switches that change their names."""
    found = mixtures(c)
    if not found:
        return
    yield "router rows permuted", c, _changed(state, ".mlp.gate.weight", lambda w: w.roll(1, 0))
    if found[0].gated:
        yield (
            "gate and up exchanged",
            c,
            _changed(state, ".gate_up_proj", lambda w: w.unflatten(1, (2, -1)).flip(1).flatten(1, 2)),
        )
    else:
        yield "rows of up in reverse order", c, _changed(state, ".gate_up_proj", lambda w: w.flip(1))
    yield "experts in reverse order", c, _changed(state, "experts.down_proj", lambda w: w.flip(0))
    if found[0].selection_bias:
        yield "selection bias zero", c, _changed(state, "e_score_correction_bias", lambda b: 0 * b)
    if found[0].shared_gate:
        renamed = {name.replace(".shared_expert.", ".shared_experts."): w for name, w in state.items()}
        yield "shared gate dropped", _mixtures(c, lambda m: replace(m, shared_gate=False)), renamed


def _changed(state: State, suffix: str, change: Callable[[Tensor], Tensor]) -> State:
    return {name: change(w) if name.endswith(suffix) else w for name, w in state.items()}


def _mixtures(c: ModelConfig, change: Callable[[MixtureSpec], MixtureSpec]) -> ModelConfig:
    layers = (
        replace(layer, feed_forward=change(layer.feed_forward))
        if isinstance(layer.feed_forward, MixtureSpec)
        else layer
        for layer in c.layers
    )
    return replace(c, layers=tuple(layers))


def _routers(c: ModelConfig, **changes: Any) -> ModelConfig:
    def change(m: MixtureSpec) -> MixtureSpec:
        router: RouterSpec = replace(m.router, **changes)
        return replace(m, router=router)

    return _mixtures(c, change)
