"""Phi-3.5-MoE: layer norms, a head with a bias, two experts chosen by a sparse mixer, and a rotary table of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.errors import ConfigError
from plait.model.config import MixtureSpec, ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.llama import activation, pre_norm_decoder, same_window_everywhere
from plait.model.families.mixture import MIXTRAL, num_experts, with_mixtures
from plait.model.name_map import Rule
from plait.model.reader import ConfigReader
from plait.ops.spec import RouterSpec

_MLP = "model.layers.{i}.mlp"
# Published files are named like Mixtral's; in the class of the transformers library the router has another name.
NAMES = replace(
    MIXTRAL, rules=(*MIXTRAL.rules, Rule(f"{_MLP}.router.weight", (f"{_MLP}.gate.weight",), read_only=True))
)


@register("phimoe", NAMES, architecture="PhimoeForCausalLM")
def phimoe(read: ConfigReader) -> ModelConfig:
    bias = read.flag("attention_bias")
    block = read.rope_block()
    config = pre_norm_decoder(
        read,
        windows=same_window_everywhere(read),
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        qkv_bias=bias,
        o_bias=bias,
        norm=NormSpec("layer", read.number("rms_norm_eps"), bias=True),
        theta=1_000_000.0,
        rope=_one_set(block),
    )
    chosen = RouterSpec(
        num_experts(read, "num_local_experts", "num_experts"),
        read.integer("num_experts_per_tok"),
        "sparse_mixer",
        jitter=read.number("router_jitter_noise", low=0.0),
    )
    mixture = MixtureSpec(chosen, read.integer("intermediate_size"), activation(read))
    rotary = tuple(replace(t, scaling={**t.scaling, **_magnitudes(block)}) for t in config.rotary)
    return with_mixtures(replace(config, rotary=rotary, head_bias=read.flag("lm_head_bias")), mixture)


def _is_long(block: Mapping[str, Any]) -> bool:
    kind = next((block[key] for key in ("rope_type", "type") if block.get(key) is not None), "default")
    if kind not in ("default", "longrope"):
        raise ConfigError(f"rope_type={kind!r}: a phimoe has the types default and longrope")
    return kind == "longrope"


def _one_set(block: Mapping[str, Any]) -> dict[str, Any]:
    """The rope block with the short set of divisors for every length: the class never uses the long one."""
    if not _is_long(block):
        return dict(block)
    ignored = ("short_mscale", "long_mscale", "attention_factor", "long_factor")
    own = {key: value for key, value in block.items() if key not in ignored}
    return {**own, "long_factor": own["short_factor"]} if "short_factor" in own else own


def _magnitudes(block: Mapping[str, Any]) -> dict[str, float]:
    """What multiplies cos and sin, up to the original context and beyond it."""
    if not _is_long(block):
        return {}
    found = []
    for key in ("short_mscale", "long_mscale"):
        value = block.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"rope_parameters.{key}={value!r} must be a positive number")
        found.append(float(value))
    return {"short_mscale": found[0], "long_mscale": found[1]}
