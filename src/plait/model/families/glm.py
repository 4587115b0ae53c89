"""GLM-4: norms on both sides of each branch, half of each head rotates in adjacent pairs."""

from __future__ import annotations

from dataclasses import replace

from plait.model.config import ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.llama import each_layer, pre_norm_decoder
from plait.model.families.llama_like import kv_heads_or_default, width_or_default
from plait.model.families.phi import FUSED_GATE_UP
from plait.model.name_map import NameMap
from plait.model.reader import ConfigReader

_DEFAULT_EOS = (151329, 151336, 151338)


@register("glm4", NameMap(rules=(FUSED_GATE_UP,)), architecture="Glm4ForCausalLM")
def glm4(read: ConfigReader) -> ModelConfig:
    norm = NormSpec(eps=read.number("rms_norm_eps"))
    config = pre_norm_decoder(
        read,
        qkv_bias=read.flag("attention_bias"),
        head_width=width_or_default(read),
        kv_heads=kv_heads_or_default(read),
        norm=norm,
        partial=0.5,
        pairing="adjacent",
    )
    config = each_layer(config, lambda layer: replace(layer, post_attention_norm=norm, post_feed_forward_norm=norm))
    return config if config.eos_token_ids else replace(config, eos_token_ids=_DEFAULT_EOS)
