"""Deliberate faults, one per switch: each takes a right configuration to a wrong one, over the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.model.config import AttentionSpec, LayerSpec, ModelConfig, NormSpec, RotarySpec
from plait.model.decoder import Decoder, build
from plait.model.rope import rope_frequencies
from plait.ops.spec import Pairing
from tests.parity import dense_mutations, latent_mutations, mixture_mutations

State = dict[str, Tensor]


@dataclass(frozen=True)
class Mutation:
    """name: what was broken. least: what it must move max |Δ log p| by."""

    name: str
    config: ModelConfig
    state: State
    least: float = 1e-2

    def decoder(self) -> Decoder:
        """The faulty model: the same weights as far as it has a place for them; what it newly needs is the identity."""
        decoder = build(self.config)
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if name in self.state:
                    parameter.copy_(self.state[name])
                else:
                    parameter.fill_(0.0)
        return decoder


def mutations(config: ModelConfig, state: State) -> Iterator[Mutation]:
    """Every fault that this configuration makes possible."""
    for name, wrong, *least in _config_faults(config):
        yield Mutation(name, wrong, state, *least)
    for name, wrong_state in _weight_faults(config, state):
        yield Mutation(name, config, wrong_state)
    for name, wrong, wrong_state in mixture_mutations.state_faults(config, state):
        yield Mutation(name, wrong, wrong_state)
    for name, wrong, wrong_state in latent_mutations.state_faults(config, state):
        yield Mutation(name, wrong, wrong_state)
    for name, wrong, wrong_state in dense_mutations.state_faults(config, state):
        yield Mutation(name, wrong, wrong_state)


def _config_faults(c: ModelConfig) -> Iterator[tuple]:
    first = c.layers[0]
    yield from latent_mutations.config_faults(c) if latent_mutations.is_latent(c) else _attention_faults(c)
    yield from _norm_faults(c)
    yield from mixture_mutations.config_faults(c)
    yield from dense_mutations.config_faults(c)
    for index, table in enumerate(c.rotary):
        for name, wrong in _rotary_faults(table):
            yield f"rotary table {index}: {name}", _with_table(c, index, wrong)
    if len(c.rotary) > 1:
        yield "rotary tables swapped", replace(c, rotary=c.rotary[::-1])
    if c.embedding_scale != 1.0:
        yield "embedding scale off", replace(c, embedding_scale=1.0)
        yield "embedding scale x1.1", replace(c, embedding_scale=c.embedding_scale * 1.1)
    if c.logit_soft_cap:
        yield "logit soft cap off", replace(c, logit_soft_cap=0.0)
        yield "logit soft cap x1.1", replace(c, logit_soft_cap=c.logit_soft_cap * 1.1)
    else:
        yield "logit soft cap on", replace(c, logit_soft_cap=10.0)
    if first.parallel:
        yield "parallel residual made sequential", _layers(c, lambda layer: replace(layer, parallel=False))
    elif first.post_attention_norm is None:
        yield "sequential residual made parallel", _layers(c, lambda layer: replace(layer, parallel=True))
    kind = first.feed_forward.activation
    if kind in ("gelu", "gelu_tanh"):
        other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}[kind]
        yield "the other GELU", _feed_forward(c, activation=other), 5e-4
    yield "another activation", _feed_forward(c, activation="relu_squared" if kind == "relu" else "relu")
    if first.feed_forward.up_bias and first.feed_forward.gated:
        yield "feed-forward biases dropped", _feed_forward(c, up_bias=False, down_bias=False)
    if first.feed_forward.up_bias:
        yield "up bias dropped", _feed_forward(c, up_bias=False)
        yield "down bias dropped", _feed_forward(c, down_bias=False)


def _attention_faults(c: ModelConfig) -> Iterator[tuple]:
    a = c.layers[0].attention
    yield "softmax scale x1.1", _attention(c, lambda a: replace(a, scale=a.scale * 1.1))
    yield "attention soft cap on", _attention(c, lambda a: replace(a, soft_cap=0.5))
    for letter in "qvo":  # a key bias adds one number to all scores of a query: softmax does not see it before rotation
        if getattr(a, f"{letter}_bias"):
            yield f"{letter} bias dropped", _attention(c, lambda a, n=f"{letter}_bias": replace(a, **{n: False}))
    if a.k_bias and a.head_norm is None and a.rotary is not None:
        yield "k bias dropped", _attention(c, lambda a: replace(a, k_bias=False))
    if a.head_norm is not None:
        yield "head norms off", _attention(c, lambda a: replace(a, head_norm=None))
    if any(layer.attention.window for layer in c.layers):
        yield "window off", _windowed(c, lambda w: 0)
        yield "window + 1", _windowed(c, lambda w: w + 1)
        yield "window - 1", _windowed(c, lambda w: w - 1 if w > 1 else 0)
        yield "windows of the neighbouring layer", _rotate_windows(c)
    else:
        yield "window on", _attention(c, lambda a: replace(a, window=9))
    rotary = next((layer.attention.rotary for layer in c.layers if layer.attention.rotary is not None), None)
    if rotary is None:
        return
    if rotary.width > 2:
        other: Pairing = "halves" if rotary.pairing == "adjacent" else "adjacent"
        yield f"pairs by {other}", _rotary_use(c, pairing=other)
    yield "no rotation", _attention(c, lambda a: replace(a, rotary=None))


def _norm_faults(c: ModelConfig) -> Iterator[tuple]:
    if c.final_norm.eps >= 0.01:
        yield "eps 1e-6", with_norms(c, lambda n: replace(n, eps=1e-6))
        yield "eps x2", with_norms(c, lambda n: replace(n, eps=2 * n.eps))
    if c.final_norm.kind == "rms":
        yield "1 + w read as w, or w as 1 + w", with_norms(c, lambda n: replace(n, unit_offset=not n.unit_offset))
        yield (
            "layer norm for RMS norm",
            with_norms(c, lambda n: replace(n, kind="layer", unit_offset=False), heads=False),
        )
    else:
        yield "RMS norm for layer norm", with_norms(c, lambda n: replace(n, kind="rms"), heads=False)
        if c.final_norm.bias:
            yield "norm biases dropped", with_norms(c, lambda n: replace(n, bias=False))
        if c.final_norm.weight:
            yield "1 + w read as w, or w as 1 + w", with_norms(c, lambda n: replace(n, unit_offset=not n.unit_offset))
    if c.layers[0].post_attention_norm is not None:
        yield "no norm after attention", _layers(c, lambda layer: replace(layer, post_attention_norm=None))
        yield "no norm after feed-forward", _layers(c, lambda layer: replace(layer, post_feed_forward_norm=None))


def _rotary_faults(table: RotarySpec) -> Iterator[tuple[str, RotarySpec]]:
    yield "theta x2", replace(table, theta=2 * table.theta)
    if table.width == table.head_width:
        half = table.width // 4 * 2
        if half and table.rope_type != "longrope":
            yield "half of the features rotate", replace(table, width=half)
    else:
        yield "all features rotate", replace(table, width=table.head_width)
        # theta^(-2i/head) is (theta^(width/head))^(-2i/width).
        yield "exponents of the whole head", replace(table, theta=table.theta ** (table.width / table.head_width))
    s = table.scaling
    if table.rope_type == "default":
        yield "linear scaling 2 on", replace(table, rope_type="linear", scaling={"factor": 2.0})
        return
    yield "scaling off", replace(table, rope_type="default", scaling={})
    yield from dense_mutations.rotary_faults(table)
    if table.rope_type in ("linear", "llama3"):
        yield "factor x1.1", replace(table, scaling={**s, "factor": s["factor"] * 1.1})
    if table.rope_type == "llama3":
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            yield f"{key} x2", replace(table, scaling={**s, key: 2 * s[key]})
    if table.rope_type == "yarn":
        yield "factor x2", replace(table, scaling={**s, "factor": 2 * s["factor"]})
        original = {"original_max_position_embeddings": 4 * s["original_max_position_embeddings"]}
        yield "original context x4", replace(table, scaling={**s, **original})
        yield "attention factor x1.1", replace(table, scaling={**s, "attention_factor": 1.1 * _magnitude(table)})
        if s.get("mscale"):
            yield "mscale ignored", replace(table, scaling={k: v for k, v in s.items() if not k.startswith("mscale")})
            yield "betas ignored", replace(table, scaling={k: v for k, v in s.items() if not k.startswith("beta")})
        if "attention_factor" in s:
            yield "attention factor ignored", replace(table, scaling=_without(s, "attention_factor"))
        if "truncate" in s:
            yield "truncated", replace(table, scaling=_without(s, "truncate"))


def _weight_faults(c: ModelConfig, state: State) -> Iterator[tuple[str, State]]:
    default = 0.0 if c.final_norm.unit_offset else 1.0
    kinds = {
        "input norm weights": "input_layernorm.weight",
        "feed-forward norm weights": ".post_attention_layernorm.weight",
        "q norm weights": "q_norm.weight",
        "k norm weights": "k_norm.weight",
        "norm weights after attention": "post_self_attn_layernorm.weight",
        "norm weights after feed-forward": "post_mlp_layernorm.weight",
        "final norm weight": "model.norm.weight",
    }
    for name, suffix in kinds.items():
        found = [n for n in state if n.endswith(suffix)]
        if found:
            yield f"{name} at their default", {**state, **{n: torch.full_like(state[n], default) for n in found}}
    if not c.tie_embeddings:
        yield "head tied", {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    a = c.layers[0].attention
    if isinstance(a, AttentionSpec) and a.num_kv_heads > 1:
        wrong = dict(state)
        for name in state:
            if "k_proj.weight" in name:
                wrong[name] = state[name].unflatten(0, (a.num_kv_heads, -1)).flip(0).flatten(0, 1)
        yield "key heads in reverse order", wrong


# Building blocks


def _magnitude(table: RotarySpec) -> float:
    return rope_frequencies(table)[1]


def _without(mapping: Any, key: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k != key}


def _layers(c: ModelConfig, change: Callable[[LayerSpec], LayerSpec]) -> ModelConfig:
    return replace(c, layers=tuple(change(layer) for layer in c.layers))


def _attention(c: ModelConfig, change: Callable[[AttentionSpec], AttentionSpec]) -> ModelConfig:
    return _layers(c, lambda layer: replace(layer, attention=change(layer.attention)))


def _feed_forward(c: ModelConfig, **changes: Any) -> ModelConfig:
    return _layers(c, lambda layer: replace(layer, feed_forward=replace(layer.feed_forward, **changes)))


def _windowed(c: ModelConfig, change: Callable[[int], int]) -> ModelConfig:
    return _attention(c, lambda a: replace(a, window=change(a.window)) if a.window else a)


def _rotate_windows(c: ModelConfig) -> ModelConfig:
    windows = [layer.attention.window for layer in c.layers]
    if len(set(windows)) == 1:
        windows = [*windows[:-1], 0]
    moved = windows[1:] + windows[:1]
    layers = (
        replace(layer, attention=replace(layer.attention, window=w)) for layer, w in zip(c.layers, moved, strict=True)
    )
    return replace(c, layers=tuple(layers))


def _rotary_use(c: ModelConfig, **changes: Any) -> ModelConfig:
    def change(a: AttentionSpec) -> AttentionSpec:
        return a if a.rotary is None else replace(a, rotary=replace(a.rotary, **changes))

    return _attention(c, change)


def _with_table(c: ModelConfig, index: int, table: RotarySpec) -> ModelConfig:
    """The configuration with another rotary table, and layers that rotate as many features as it has."""
    tables = (*c.rotary[:index], table, *c.rotary[index + 1 :])

    def change(a: AttentionSpec) -> AttentionSpec:
        if a.rotary is None or a.rotary.table != index:
            return a
        return replace(a, rotary=replace(a.rotary, width=table.width))

    return _attention(replace(c, rotary=tables), change)


def with_norms(c: ModelConfig, change: Callable[[NormSpec], NormSpec], heads: bool = True) -> ModelConfig:
    """Every norm of the model changed; heads: those of q and k too."""

    def maybe(norm: NormSpec | None) -> NormSpec | None:
        return None if norm is None else change(norm)

    def layer(old: LayerSpec) -> LayerSpec:
        a = old.attention
        inner = "inner_norm" if latent_mutations.is_latent(c) else "head_norm"
        return replace(
            old,
            attention=replace(a, **{inner: maybe(getattr(a, inner))}) if heads else a,
            pre_attention_norm=maybe(old.pre_attention_norm),
            pre_feed_forward_norm=maybe(old.pre_feed_forward_norm),
            post_attention_norm=maybe(old.post_attention_norm),
            post_feed_forward_norm=maybe(old.post_feed_forward_norm),
        )

    return replace(_layers(c, layer), final_norm=change(c.final_norm))
