"""Apertus: a plain feed-forward with xIELU, q and k normed per head, llama3 scaling."""

from __future__ import annotations

from plait.errors import ConfigError
from plait.model.config import ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.llama import pre_norm_decoder
from plait.model.name_map import NameMap, paired
from plait.model.reader import ConfigReader

_LAYER = "model.layers.{i}"
NAMES = NameMap(
    rules=(
        *paired(f"{_LAYER}.attention_layernorm", f"{_LAYER}.input_layernorm"),
        *paired(f"{_LAYER}.feedforward_layernorm", f"{_LAYER}.post_attention_layernorm"),
    )
)
_THETA = 12_000_000.0
_DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# Keys of published configurations, of which the class knows one form.
_FIXED = {"mlp_bias": False, "post_norm": False, "qk_norm": True}


@register("apertus", NAMES, architecture="ApertusForCausalLM")
def apertus(read: ConfigReader) -> ModelConfig:
    for key, only in _FIXED.items():
        if read.given(key, only) != only:
            raise ConfigError(f"{key}={read.raw[key]!r}: an apertus has {str(only).lower()} here")
    bias = read.flag("attention_bias")
    return pre_norm_decoder(
        read,
        qkv_bias=bias,
        o_bias=bias,
        head_norm=NormSpec(eps=read.number("rms_norm_eps")),
        theta=_THETA,
        gated=False,
        rope=read.rope_block() or _DEFAULT_ROPE,
    )
