"""Falcon: q, k and v in one tensor, group by group; parallel branches after one LayerNorm or after one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from plait.errors import ConfigError
from plait.model.config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormSpec, RotaryUse
from plait.model.families import register
from plait.model.families.llama import activation, exact_head_width, sizes, special_tokens
from plait.model.name_map import NameMap, Rule, joined_q_k_v, paired
from plait.model.reader import ConfigReader


def grouped_qkv(config: ModelConfig, layer: int) -> Sequence[NDArray[np.int64]]:
    """Rows of q, k and v in a matrix of groups: the queries of one key/value head, its key, its value."""
    a = config.layers[layer].attention
    assert isinstance(a, AttentionSpec)
    per_group = a.num_heads // a.num_kv_heads
    shape = (a.num_kv_heads, per_group + 2, a.key_width)
    rows = np.arange(prod(shape)).reshape(shape)
    return [rows[:, :per_group].ravel(), rows[:, per_group].ravel(), rows[:, per_group + 1].ravel()]


def _two_norms(config: ModelConfig) -> bool:
    layer = config.layers[0]
    return layer.parallel and not layer.shared_norm


def _other(config: ModelConfig) -> bool:
    return not _two_norms(config)


_FILE, _OURS = "transformer.h.{i}", "model.layers.{i}"
_BOTH = ("weight", "bias")


def _norm(file: str, ours: str, when: Callable[[ModelConfig], bool]) -> tuple[Rule, ...]:
    return tuple(replace(rule, when=when) for rule in paired(f"{_FILE}.{file}", f"{_OURS}.{ours}", _BOTH))


NAMES = NameMap(
    rules=(
        *paired("transformer.word_embeddings", "model.embed_tokens"),
        *paired("transformer.ln_f", "model.norm", _BOTH),
        *_norm("ln_attn", "input_layernorm", _two_norms),
        *_norm("ln_mlp", "post_attention_layernorm", _two_norms),
        *_norm("input_layernorm", "input_layernorm", _other),
        *_norm("post_attention_layernorm", "post_attention_layernorm", _other),
        *paired(f"{_FILE}.self_attention.dense", f"{_OURS}.self_attn.o_proj", _BOTH),
        *paired(f"{_FILE}.mlp.dense_h_to_4h", f"{_OURS}.mlp.up_proj", _BOTH),
        *paired(f"{_FILE}.mlp.dense_4h_to_h", f"{_OURS}.mlp.down_proj", _BOTH),
        *joined_q_k_v(f"{_FILE}.self_attention.query_key_value", f"{_OURS}.self_attn", grouped_qkv),
    )
)


@register("falcon", NAMES, architecture="FalconForCausalLM")
def falcon(read: ConfigReader) -> ModelConfig:
    d, heads, num_layers = sizes(read)
    width = exact_head_width(d, heads)
    if read.flag("alibi"):
        raise ConfigError("alibi=true: a falcon with ALiBi instead of rotary positions is not supported")
    grouped, parallel, bias = read.flag("new_decoder_architecture"), read.flag("parallel_attn"), read.flag("bias")
    one_kv_head, kv = read.flag("multi_query"), read.integer("num_kv_heads", heads)
    norms = read.integer("num_ln_in_parallel_attn", 2 if grouped else 1)
    if not parallel and grouped:
        raise ConfigError("parallel_attn=false with new_decoder_architecture=true: no such falcon is supported")
    if norms not in (1, 2) or (norms == 2 and not grouped):
        raise ConfigError(f"num_ln_in_parallel_attn={norms} must be 1, or 2 with new_decoder_architecture")
    if not grouped:
        kv = 1 if one_kv_head else heads
    max_positions = read.integer("max_position_embeddings")
    rotary = read.rotary(width, read.rope_block(), read.given("rope_theta", 10_000.0), max_positions)
    norm = NormSpec("layer", read.number("layer_norm_epsilon"), bias=True)
    one_norm = parallel and norms == 1
    layer = LayerSpec(
        AttentionSpec(heads, kv, width, width, width**-0.5, bias, bias, bias, bias, rotary=RotaryUse(0, rotary.width)),
        FeedForwardSpec(read.integer("ffn_hidden_size", 4 * d), activation(read, "activation"), False, bias, bias),
        norm,
        None if one_norm else norm,
        parallel=parallel,
        shared_norm=one_norm,
    )
    return ModelConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=d,
        layers=(layer,) * num_layers,
        rotary=(rotary,),
        final_norm=norm,
        tie_embeddings=read.flag("tie_word_embeddings"),
        max_positions=max_positions,
        attention_dropout=read.dropout("attention_dropout"),
        hidden_dropout=read.dropout("hidden_dropout"),
        **special_tokens(read),
    )
