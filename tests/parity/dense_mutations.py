"""Deliberate faults of the switches that the first families do not have, for tests/parity/mutations.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from plait.model.config import AttentionSpec, LayerSpec, ModelConfig, RotarySpec

State = dict[str, Tensor]


def config_faults(c: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Wrong multipliers, positions, clips, and what reads which norm."""
    first = c.layers[0]
    if first.branch_scale != 1.0:
        yield "branch scale off", _layers(c, lambda layer: replace(layer, branch_scale=1.0))
        yield "branch scale x1.1", _layers(c, lambda layer: replace(layer, branch_scale=1.1 * layer.branch_scale))
    if first.shared_norm:
        yield "feed-forward without the shared norm", _layers(c, lambda layer: replace(layer, shared_norm=False))
    if c.logit_scale != 1.0:
        yield "logit scale off", replace(c, logit_scale=1.0)
        yield "logit scale x1.1", replace(c, logit_scale=1.1 * c.logit_scale)
    if c.head_bias:
        yield "head bias dropped", replace(c, head_bias=False)
    if c.position_rows:
        yield "learned positions dropped", replace(c, position_rows=0)
        yield "learned positions one further", replace(c, position_offset=c.position_offset + 1)
    if isinstance(first.attention, AttentionSpec):
        yield from _attention_faults(c, first.attention)


def _attention_faults(c: ModelConfig, a: AttentionSpec) -> Iterator[tuple[str, ModelConfig]]:
    if a.clip:
        yield "clip off", _attention(c, lambda a: replace(a, clip=0.0))
        yield "clip x1.1", _attention(c, lambda a: replace(a, clip=1.1 * a.clip))
    else:
        yield "clip on", _attention(c, lambda a: replace(a, clip=0.3))
    if a.sinks:
        yield "sinks dropped", _attention(c, lambda a: replace(a, sinks=False))
    if a.soft_cap:
        yield "attention soft cap off", _attention(c, lambda a: replace(a, soft_cap=0.0))
        yield "attention soft cap x1.1", _attention(c, lambda a: replace(a, soft_cap=1.1 * a.soft_cap))
    if a.head_norm is not None and a.head_norm_over != "projection" and a.rotary is not None:
        yield (
            "head norms on the other side of rotary",
            _attention(c, lambda a: replace(a, head_norm_after_rotary=not a.head_norm_after_rotary)),
        )
    rotating = [layer.attention.rotary for layer in c.layers if layer.attention.rotary is not None]
    if rotating and len(rotating) < len(c.layers):
        yield "every layer rotates", _attention(c, lambda a: replace(a, rotary=a.rotary or rotating[0]))


def state_faults(c: ModelConfig, state: State) -> Iterator[tuple[str, ModelConfig, State]]:
    """q and k normed over another set of features, with the same weights; sinks and the numbers of xIELU."""
    if getattr(c.layers[0].attention, "sinks", False):
        yield "sinks of the next head", c, _changed(state, ".sinks", lambda w: w.roll(1, 0))
        yield "sinks x1.1", c, _changed(state, ".sinks", lambda w: 1.1 * w)
    if c.layers[0].feed_forward.activation == "xielu":
        for name in ("alpha_p", "alpha_n", "beta"):
            yield f"{name} x1.1", c, _changed(state, f".act_fn.{name}", lambda w: 1.1 * w)
        yield "eps near 0", c, _changed(state, ".act_fn.eps", lambda w: 0 * w - 1e-6)
    over = getattr(c.layers[0].attention, "head_norm_over", None)
    if over == "projection":
        a = c.layers[0].attention
        split = {"q_norm.weight": a.num_heads, "k_norm.weight": a.num_kv_heads}
        wrong = {
            name: next((w.unflatten(0, (n, -1)) for end, n in split.items() if name.endswith(end)), w)
            for name, w in state.items()
        }
        yield "norm of each head", _attention(c, lambda a: replace(a, head_norm_over="own_head")), wrong
    if over == "own_head":
        norms = ("q_norm.weight", "k_norm.weight")
        whole = {name: w.flatten() if name.endswith(norms) else w for name, w in state.items()}
        yield "norm of all heads", _attention(c, lambda a: replace(a, head_norm_over="projection")), whole
        rolled = {name: w.roll(1, 0) if name.endswith(norms) else w for name, w in state.items()}
        yield "norm weights of the next head", c, rolled


def _changed(state: State, suffix: str, change: Callable[[Tensor], Tensor]) -> State:
    return {name: change(w) if name.endswith(suffix) else w for name, w in state.items()}


def rotary_faults(table: RotarySpec) -> Iterator[tuple[str, RotarySpec]]:
    """Of rotary types that have no factor."""
    s = table.scaling
    if table.rope_type == "ntk_alpha":
        yield "alpha x1.1", replace(table, scaling={**s, "alpha": 1.1 * s["alpha"]})
    if table.rope_type == "longrope":
        if s["short_factor"] != s["long_factor"]:
            exchanged = {"short_factor": s["long_factor"], "long_factor": s["short_factor"]}
            yield "the other set", replace(table, scaling={**s, **exchanged})
        if "long_mscale" in s:
            short, long = "short_mscale", "long_mscale"
            yield "the other magnitude", replace(table, scaling={**s, short: s[long], long: s[short]})
            yield "attention factor ignored", replace(table, scaling={**s, short: 1.0, long: 1.0})
        else:
            yield "attention factor ignored", replace(table, scaling={**s, "attention_factor": 1.0})
            yield "factor x2", replace(table, max_positions=2 * table.max_positions)


def _layers(c: ModelConfig, change: Callable[[LayerSpec], LayerSpec]) -> ModelConfig:
    return replace(c, layers=tuple(change(layer) for layer in c.layers))


def _attention(c: ModelConfig, change: Callable[[AttentionSpec], AttentionSpec]) -> ModelConfig:
    return _layers(c, lambda layer: replace(layer, attention=change(layer.attention)))
