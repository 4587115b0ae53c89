"""plait's own family for studies: a plain GPT with rotary positions, dense or with mixtures of plain experts.

RMS norms before each branch, no biases, a feed-forward of two matrices with the exact GELU. A mixture's router is a
softmax over all experts; the weights of several chosen experts are divided by their sum, that of a single one is its
probability as it is, which is what gives the router a gradient (and 1 where there is one expert).

No other program has a class for it. Its files have plait's own names.
"""

from __future__ import annotations

from typing import Any

from plait.errors import ConfigError
from plait.model.config import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    MixtureSpec,
    ModelConfig,
    NormSpec,
    RotaryUse,
)
from plait.model.families import register
from plait.model.families.llama import not_negative, sizes, special_tokens
from plait.model.reader import ConfigReader
from plait.ops.spec import RouterSpec

# Every key, and what it is where it is not given; None: it must be given (the token ids need not).
KEYS: dict[str, Any] = {
    "vocab_size": None,
    "d_model": None,
    "n_ctx": None,
    "n_layers": None,
    "n_heads": None,
    "dropout": 0.0,
    "rope_base": 10_000.0,
    "tie_embeddings": True,
    "use_moe": False,
    "d_ff": None,
    "n_experts": 4,
    "top_k": 1,
    "n_shared": 0,
    "d_expert": 512,
    "selection_bias": False,
    "aux_loss_coef": 0.01,
    "z_loss_coef": 0.001,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@register("plait_gpt", keys=KEYS, tie_key="tie_embeddings")
def plait_gpt(read: ConfigReader) -> ModelConfig:
    """Keys: `KEYS`. n_experts counts the routed experts; the n_shared shared ones, of the same width, stand beside them
    as one feed-forward. d_ff is read where use_moe is false, the keys of a mixture where it is true: a recipe may give
    both, and switch."""
    d, heads, num_layers = sizes(read, "d_model", "n_heads", "n_layers")
    if d % heads or d // heads % 2:
        raise ConfigError(f"d_model={d} must be an even multiple of n_heads={heads}: heads rotate by pairs of features")
    width, norm, dropout = d // heads, NormSpec(eps=1e-6), read.dropout("dropout")
    n_ctx = _at_least_one(read, "n_ctx")
    attention = AttentionSpec(heads, heads, width, width, width**-0.5, rotary=RotaryUse(0, width))
    layer = LayerSpec(attention, _feed_forward(read), norm, norm)
    return ModelConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=d,
        layers=(layer,) * num_layers,
        rotary=(read.rotary(width, {}, read.positive("rope_base"), n_ctx, 1.0),),
        final_norm=norm,
        tie_embeddings=read.flag("tie_embeddings"),
        max_positions=n_ctx,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        scaled_residuals=True,
        balance_loss_coef=read.number("aux_loss_coef", low=0.0),
        z_loss_coef=read.number("z_loss_coef", low=0.0),
        **special_tokens(read),
    )


def _feed_forward(read: ConfigReader) -> FeedForwardSpec | MixtureSpec:
    dense = read.optional_integer("d_ff")
    experts, top_k = _at_least_one(read, "n_experts"), _at_least_one(read, "top_k")
    shared, width = not_negative(read, "n_shared"), _at_least_one(read, "d_expert")
    selection_bias = read.flag("selection_bias")
    if not read.flag("use_moe"):
        if dense is None or dense < 1:
            raise ConfigError(f"d_ff={dense} must be at least 1: the feed-forward's width where use_moe is false")
        return FeedForwardSpec(dense, "gelu", gated=False)
    if top_k > experts:
        raise ConfigError(f"top_k={top_k} is more than n_experts={experts}")
    return MixtureSpec(
        RouterSpec(experts, top_k, renormalise="several"),
        width,
        "gelu",
        gated=False,
        selection_bias=selection_bias,
        shared=FeedForwardSpec(shared * width, "gelu", gated=False) if shared else None,
    )


def _at_least_one(read: ConfigReader, key: str) -> int:
    value = read.integer(key)
    if value < 1:
        raise ConfigError(f"{key}={value} must be at least 1")
    return value
