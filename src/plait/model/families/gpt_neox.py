"""GPT-NeoX (Pythia): LayerNorm, parallel residual, a quarter of each head rotates, plain feed-forward, biases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait.model.config import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
    RotaryUse,
)
from plait.model.families import register
from plait.model.families.llama import activation, exact_head_width, sizes, special_tokens
from plait.model.name_map import NameMap, joined_q_k_v, paired
from plait.model.reader import ConfigReader


def interleaved_qkv(config: ModelConfig, layer: int) -> Sequence[NDArray[np.int64]]:
    """Rows of q, k and v in a matrix that holds them head by head: [heads, 3, head_dim]."""
    spec = config.layers[layer].attention
    rows = np.arange(3 * spec.num_heads * spec.key_width).reshape(spec.num_heads, 3, spec.key_width)
    return [rows[:, part].ravel() for part in range(3)]


_FILE, _OURS = "gpt_neox.layers.{i}", "model.layers.{i}"
_BOTH = ("weight", "bias")
NAMES = NameMap(
    rules=(
        *paired("gpt_neox.embed_in", "model.embed_tokens"),
        *paired("gpt_neox.final_layer_norm", "model.norm", _BOTH),
        *paired("embed_out", "lm_head"),
        *paired(f"{_FILE}.input_layernorm", f"{_OURS}.input_layernorm", _BOTH),
        *paired(f"{_FILE}.post_attention_layernorm", f"{_OURS}.post_attention_layernorm", _BOTH),
        *paired(f"{_FILE}.attention.dense", f"{_OURS}.self_attn.o_proj", _BOTH),
        *paired(f"{_FILE}.mlp.dense_h_to_4h", f"{_OURS}.mlp.up_proj", _BOTH),
        *paired(f"{_FILE}.mlp.dense_4h_to_h", f"{_OURS}.mlp.down_proj", _BOTH),
        *joined_q_k_v(f"{_FILE}.attention.query_key_value", f"{_OURS}.self_attn", interleaved_qkv),
    ),
    skip=(r"(.*\.)?attention\.(bias|masked_bias)",),
)


@register("gpt_neox", NAMES, architecture="GPTNeoXForCausalLM")
def gpt_neox(read: ConfigReader) -> ModelConfig:
    d, heads, num_layers = sizes(read)
    width = exact_head_width(d, heads)
    max_positions = read.integer("max_position_embeddings")
    theta = read.given("rotary_emb_base", 10_000.0)
    partial = read.given("rotary_pct", 0.25)
    rotary = read.rotary(width, read.rope_block(), theta, max_positions, partial)
    norm = NormSpec("layer", read.number("layer_norm_eps"), bias=True)
    bias = read.flag("attention_bias")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        key_width=width,
        value_width=width,
        scale=width**-0.5,
        q_bias=bias,
        k_bias=bias,
        v_bias=bias,
        o_bias=bias,
        rotary=RotaryUse(0, rotary.width),
    )
    mlp = FeedForwardSpec(
        read.integer("intermediate_size"), activation(read), gated=False, up_bias=True, down_bias=True
    )
    layer = LayerSpec(attention, mlp, norm, norm, parallel=read.flag("use_parallel_residual"))
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
        embedding_dropout=read.dropout("hidden_dropout"),
        hidden_dropout=read.dropout("hidden_dropout"),
        **special_tokens(read),
    )
