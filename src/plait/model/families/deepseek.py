"""Families with latent attention: DeepSeek V2 and V3, Kimi K2 (V3 under another name), MiniCPM3."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite, sqrt
from typing import Any

from plait.errors import ConfigError
from plait.model.config import FeedForwardSpec, LatentAttentionSpec, MixtureSpec, ModelConfig, RotarySpec, RotaryUse
from plait.model.families import register
from plait.model.families.llama import activation, each_layer, exact_head_width, pre_norm_decoder
from plait.model.families.mixture import (
    NEXT_TOKEN_LAYERS,
    PER_EXPERT,
    num_experts,
    router,
    sigmoid_mixtures,
    with_mixtures,
)
from plait.model.reader import ConfigReader
from plait.model.rope import yarn_factor, yarn_mscale
from plait.ops.spec import Pairing, RotaryFp32

# Keys of published configurations that concern training only.
_TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size")


def latent_decoder(
    read: ConfigReader,
    pairing: Pairing,
    *,
    rotary_fp32: RotaryFp32 = "nothing",
    mlp_bias: bool = False,
    value_width: int | None = None,
) -> ModelConfig:
    """The shape that these families share, every feed-forward dense. value_width: default `v_head_dim`."""
    heads, nope, rope = (read.integer(key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    kv_heads = read.optional_integer("num_key_value_heads", heads)
    if kv_heads != heads:
        raise ConfigError(
            f"num_key_value_heads={kv_heads} must be num_attention_heads={heads}: all heads share one latent"
        )
    if rope < 2 or rope % 2:
        raise ConfigError(f"qk_rope_head_dim={rope} must be even and at least 2")
    # Widths that transformers derives and writes down; any other value is one that nobody obeys.
    if read.raw.get("head_dim") in (rope, nope + rope):
        read("head_dim")
    if read.raw.get("qk_head_dim") == nope + rope:
        read("qk_head_dim")
    config = pre_norm_decoder(read, head_width=rope, kv_heads=heads, mlp_bias=mlp_bias)
    rank = read("q_lora_rank")
    attention = LatentAttentionSpec(
        num_heads=heads,
        latent_width=read.integer("kv_lora_rank"),
        nope_width=nope,
        rope_width=rope,
        value_width=read.integer("v_head_dim") if value_width is None else value_width,
        scale=_softmax_scale(config.rotary[0], nope + rope),
        rotary=RotaryUse(0, rope, pairing, rotary_fp32),
        query_rank=None if rank is None else read.integer("q_lora_rank"),
        bias=read.flag("attention_bias"),
    )
    return each_layer(config, lambda layer: replace(layer, attention=attention))


def _softmax_scale(rotary: RotarySpec, width: int) -> float:
    """width^-1/2, with yarn's mscale_all_dim times m^2 (DeepSeek's correction of the scores for longer contexts)."""
    scale, m_all = max(width, 1) ** -0.5, rotary.scaling.get("mscale_all_dim")
    if rotary.rope_type != "yarn" or not m_all:
        return scale
    m = yarn_mscale(yarn_factor(rotary), m_all)
    if not isfinite(scale * m * m):
        raise ConfigError(f"rope_parameters.mscale_all_dim={m_all!r} makes a softmax scale that is not finite")
    return scale * m * m


def _only(read: ConfigReader, key: str, *allowed: Any) -> None:
    """Refuse a value that would change the computation; absent and null mean the first."""
    value = read.given(key, allowed[0])
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}: a {read.model_type} has {' or '.join(map(repr, allowed))}")


def _published(read: ConfigReader, scores: str) -> None:
    """Keys that the authors' own code reads and transformers does not."""
    _only(read, "scoring_func", scores)
    _only(read, "moe_layer_freq", 1)
    for key in _TRAINING:
        read(key)


@register("deepseek_v2", PER_EXPERT, architecture="DeepseekV2ForCausalLM")
def deepseek_v2(read: ConfigReader) -> ModelConfig:
    _published(read, "softmax")
    bias = read.flag("mlp_bias")
    config = latent_decoder(read, "adjacent", rotary_fp32="tables", mlp_bias=bias)
    method = read("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method={method!r}: a deepseek_v2 has 'greedy' or 'group_limited_greedy'")
    groups: dict[str, Any] = {}
    for key in ("n_group", "topk_group", "routed_scaling_factor"):  # without a meaning in some of the ways below
        read(key)
    if method == "group_limited_greedy":
        groups = {"groups": read.integer("n_group"), "top_groups": read.integer("topk_group")}
        if groups["groups"] < 1:
            raise ConfigError(f"n_group={groups['groups']} must be at least 1 for topk_method='group_limited_greedy'")
        groups |= {"group_score": "best", "masked": "zero"}
        if groups["groups"] == groups["top_groups"] == 1:  # every expert is in the only group
            groups = {}
    # As the authors' code does it, and not transformers: weights are renormalised or scaled, never both.
    renormalised = read.flag("norm_topk_prob") and read.integer("num_experts_per_tok") > 1
    chosen = router(
        read,
        num_experts(read, "n_routed_experts", "num_experts"),
        renormalise="always" if renormalised else "never",
        scale=1.0 if renormalised else read.number("routed_scaling_factor"),
        **groups,
    )
    width, act = read.integer("moe_intermediate_size"), activation(read)
    shared = FeedForwardSpec(width * read.integer("n_shared_experts"), act, True, bias, bias)
    mixture = MixtureSpec(chosen, width, act, shared=shared)
    dense = read.integer("first_k_dense_replace", 0)
    return with_mixtures(config, mixture, [i >= dense for i in range(len(config.layers))])


_V3 = replace(PER_EXPERT, skip=(NEXT_TOKEN_LAYERS,))


@register("kimi_k2", _V3, architecture="DeepseekV3ForCausalLM", written_as="deepseek_v3")
@register("deepseek_v3", _V3, architecture="DeepseekV3ForCausalLM")
def deepseek_v3(read: ConfigReader) -> ModelConfig:
    _published(read, "sigmoid")
    _only(read, "topk_method", "noaux_tc")
    # Null is false here, as in transformers, though the key's default is true.
    interleaved = read.flag("rope_interleave") and read("rope_interleave") is not None
    config = sigmoid_mixtures(read, latent_decoder(read, "adjacent" if interleaved else "halves"))
    return replace(config, next_token_layers=_next_token_layers(read))


def _next_token_layers(read: ConfigReader) -> int:
    """How many layers after the last predict further tokens; a checkpoint may hold them, and they are skipped."""
    first, second = (read.optional_integer(key) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    if first is not None and second is not None and first != second:
        raise ConfigError(f"num_nextn_predict_layers={first} and num_mtp_layers={second} differ")
    count = next((number for number in (first, second) if number is not None), 1)
    if not 0 <= count <= 1000:
        raise ConfigError(f"num_nextn_predict_layers={count} must be at least 0 and at most 1000")
    return count


@register("minicpm3", architecture="MiniCPM3ForCausalLM")
def minicpm3(read: ConfigReader) -> ModelConfig:
    hidden, heads, value_width = (
        read.integer("hidden_size"),
        read.integer("num_attention_heads"),
        read.optional_integer("v_head_dim"),
    )
    if value_width is None:
        if heads < 1:
            raise ConfigError(f"num_attention_heads={heads} must be at least 1")
        value_width = exact_head_width(hidden, heads)
    config = latent_decoder(read, "halves", mlp_bias=read.flag("mlp_bias"), value_width=value_width)
    branch_scale = 1.0
    if not _is_null(read, "scale_depth"):
        branch_scale = read.number("scale_depth") / sqrt(len(config.layers))
    base = hidden if _is_null(read, "dim_model_base") else read.integer("dim_model_base")
    if base < 1:
        raise ConfigError(f"dim_model_base={base} must be at least 1")
    return replace(
        each_layer(config, lambda layer: replace(layer, branch_scale=branch_scale)),
        embedding_scale=read.number("scale_emb"),
        round_embedding_scale=True,
        logit_scale=base / hidden,
    )


def _is_null(read: ConfigReader, key: str) -> bool:
    """Whether a key is given as null, which means no scaling here, and not the default."""
    return key in read.raw and read(key) is None
