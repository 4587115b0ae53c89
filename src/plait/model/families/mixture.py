"""Llama-like families whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plait.errors import ConfigError
from plait.model.config import FeedForwardSpec, LayerSpec, MixtureSpec, ModelConfig, NormSpec
from plait.model.expert_names import expert_rules
from plait.model.families import register
from plait.model.families.llama import (
    activation,
    each_attention,
    each_layer,
    not_negative,
    pre_norm_decoder,
    require_window,
    same_window_everywhere,
)
from plait.model.families.llama_like import with_multipliers
from plait.model.name_map import NameMap, Rule, paired
from plait.model.reader import ConfigReader
from plait.ops.spec import RouterSpec

_OURS = "model.layers.{i}.mlp"
_EACH = f"{_OURS}.experts.{{e}}"
_OLD_MIXTRAL = "model.layers.{i}.block_sparse_moe"
# One tensor per expert, or the stacks under our own names, which need no rule.
PER_EXPERT = NameMap(expert_rules(f"{_EACH}.{{part}}_proj.weight"))
MIXTRAL = NameMap(
    (
        *paired(f"{_OLD_MIXTRAL}.gate", f"{_OURS}.gate"),
        *expert_rules(f"{_OLD_MIXTRAL}.experts.{{e}}.{{part}}.weight", ("w1", "w3", "w2")),
    )
)

# input_linear and output_linear in published files; the class's own names where transformers saved those.
_GRANITE = "model.layers.{i}.block_sparse_moe"
GRANITE = NameMap(
    (
        Rule(f"{_GRANITE}.input_linear.weight", (f"{_OURS}.experts.gate_up_proj",)),
        Rule(f"{_GRANITE}.output_linear.weight", (f"{_OURS}.experts.down_proj",)),
        Rule(f"{_GRANITE}.router.layer.weight", (f"{_OURS}.gate.weight",)),
        Rule(f"{_GRANITE}.experts.gate_up_proj", (f"{_OURS}.experts.gate_up_proj",), read_only=True),
        Rule(f"{_GRANITE}.experts.down_proj", (f"{_OURS}.experts.down_proj",), read_only=True),
        Rule(f"{_GRANITE}.router.weight", (f"{_OURS}.gate.weight",), read_only=True),
    )
)
# Layers after the last predict further tokens, for speculation.
NEXT_TOKEN_LAYERS = r"model\.layers\.{n}\..*"


def num_experts(read: ConfigReader, key: str, other: str) -> int:
    """How many experts a layer has: `key`, or its second spelling, which must not say something else."""
    first, second = read.optional_integer(key), read.optional_integer(other)
    if first is not None and second is not None and first != second:
        raise ConfigError(f"{key}={first} and {other}={second} are two spellings of one key and differ")
    count = read.integer(key) if second is None else second
    if count < 0:
        raise ConfigError(f"{key if second is None else other}={count} must not be negative")
    return count


def router(read: ConfigReader, experts: int, **changes: Any) -> RouterSpec:
    """Softmax over all experts, the weights renormalised where `norm_topk_prob` says so."""
    if "renormalise" not in changes:
        changes["renormalise"] = "always" if read.flag("norm_topk_prob") else "never"
    return RouterSpec(experts, read.integer("num_experts_per_tok"), **changes)


def sparse_layers(read: ConfigReader, experts: int) -> list[bool]:
    """Which layers are mixtures: every `decoder_sparse_step`-th, but none of `mlp_only_layers`."""
    num_layers, step, dense = read.num_layers(), read.integer("decoder_sparse_step"), read("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise ConfigError(f"mlp_only_layers={dense!r} in config.json must be a list of layer numbers")
    if step < 1:
        raise ConfigError(f"decoder_sparse_step={step} must be at least 1")
    return [experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def with_mixtures(config: ModelConfig, mixture: MixtureSpec, sparse: list[bool] | None = None) -> ModelConfig:
    """The configuration with the feed-forwards of all layers, or of the sparse ones, replaced by a mixture."""
    if sparse is None:
        return each_layer(config, lambda layer: replace(layer, feed_forward=mixture))
    layers: list[LayerSpec] = []
    for layer, is_mixture in zip(config.layers, sparse, strict=True):
        layers.append(replace(layer, feed_forward=mixture) if is_mixture else layer)
    return replace(config, layers=tuple(layers))


@register("qwen3_moe", PER_EXPERT, architecture="Qwen3MoeForCausalLM")
def qwen3_moe(read: ConfigReader) -> ModelConfig:
    windows = same_window_everywhere(read, used=read.flag("use_sliding_window"))
    if not any(windows):
        read.given("max_window_layers")  # published configurations have it, for windows that are off
    bias = read.flag("attention_bias")
    config = pre_norm_decoder(
        read,
        windows=windows,
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        qkv_bias=bias,
        o_bias=bias,
        head_norm=NormSpec(eps=read.number("rms_norm_eps")),
    )
    experts = num_experts(read, "num_experts", "num_local_experts")
    mixture = MixtureSpec(router(read, experts), read.integer("moe_intermediate_size"), activation(read))
    return with_mixtures(config, mixture, sparse_layers(read, experts))


@register("qwen2_moe", PER_EXPERT, architecture="Qwen2MoeForCausalLM")
def qwen2_moe(read: ConfigReader) -> ModelConfig:
    bias = read.flag("qkv_bias")
    config = pre_norm_decoder(
        read,
        windows=_lower_even_windows(read),
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        qkv_bias=bias,
    )
    experts, act = num_experts(read, "num_experts", "num_local_experts"), activation(read)
    shared = FeedForwardSpec(read.integer("shared_expert_intermediate_size"), act)
    width = read.integer("moe_intermediate_size")
    mixture = MixtureSpec(router(read, experts), width, act, shared=shared, shared_gate=True)
    return with_mixtures(config, mixture, sparse_layers(read, experts))


def _lower_even_windows(read: ConfigReader) -> list[int]:
    """Window per layer: `layer_types` decides; else the even layers below `max_window_layers`, when in use."""
    num_layers, below = read.num_layers(), read.integer("max_window_layers")
    window = not_negative(read, "sliding_window") * read.flag("use_sliding_window")
    types = read.layer_types(num_layers)
    if types is None:
        return [window if i % 2 == 0 and i < below else 0 for i in range(num_layers)]
    require_window(window, types)
    return [window if kind == "sliding_attention" else 0 for kind in types]


@register("mixtral", MIXTRAL, architecture="MixtralForCausalLM")
def mixtral(read: ConfigReader) -> ModelConfig:
    config = pre_norm_decoder(
        read,
        windows=same_window_everywhere(read),
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        theta=1_000_000.0,
    )
    experts = num_experts(read, "num_local_experts", "num_experts")
    chosen = router(read, experts, renormalise="always")
    return with_mixtures(config, MixtureSpec(chosen, read.integer("intermediate_size"), activation(read)))


@register("olmoe", PER_EXPERT, architecture="OlmoeForCausalLM")
def olmoe(read: ConfigReader) -> ModelConfig:
    bias = read.flag("attention_bias")
    norm = NormSpec(eps=read.number("rms_norm_eps"))
    config = pre_norm_decoder(read, qkv_bias=bias, o_bias=bias, head_norm=norm)
    clip = 0.0 if read("clip_qkv") is None else read.positive("clip_qkv")
    config = each_attention(config, head_norm_over="projection", clip=clip)
    experts = num_experts(read, "num_experts", "num_local_experts")
    return with_mixtures(
        config, MixtureSpec(router(read, experts), read.integer("intermediate_size"), activation(read))
    )


@register("granitemoe", GRANITE, architecture="GraniteMoeForCausalLM")
def granitemoe(read: ConfigReader) -> ModelConfig:
    bias = read.flag("attention_bias")
    config = with_multipliers(read, pre_norm_decoder(read, qkv_bias=bias, o_bias=bias))
    chosen = router(read, read.integer("num_local_experts"), scores="topk_softmax", renormalise="never")
    return with_mixtures(config, MixtureSpec(chosen, read.integer("intermediate_size"), activation(read)))


def sigmoid_mixtures(read: ConfigReader, config: ModelConfig) -> ModelConfig:
    """The mixtures of DeepSeek-V3 in a configuration: sigmoid scores, a bias for the selection, groups that score by
    their two best, and a shared expert, after `first_k_dense_replace` dense layers."""
    groups, top_groups = read.integer("n_group", 1), read.integer("topk_group", 1)
    chosen = router(
        read,
        num_experts(read, "n_routed_experts", "num_local_experts"),
        scores="sigmoid",
        scale=read.number("routed_scaling_factor"),
        groups=0 if groups == top_groups == 1 else groups,
        top_groups=0 if groups == top_groups == 1 else top_groups,
        group_score="two_best",
    )
    width, act = read.integer("moe_intermediate_size"), activation(read)
    shared = FeedForwardSpec(width * read.integer("n_shared_experts"), act)
    mixture = MixtureSpec(chosen, width, act, selection_bias=True, shared=shared)
    dense = read.integer("first_k_dense_replace", 0)
    return with_mixtures(config, mixture, [i >= dense for i in range(len(config.layers))])


@register("dots1", PER_EXPERT, architecture="Dots1ForCausalLM")
def dots1(read: ConfigReader) -> ModelConfig:
    num_layers, window = read.num_layers(), read.integer("sliding_window", 0)
    first = read.integer("max_window_layers", num_layers)
    types = read.layer_types(num_layers)
    if types is None:
        windows = [window if i >= first else 0 for i in range(num_layers)]
    else:
        require_window(window, types)
        windows = [window if kind == "sliding_attention" else 0 for kind in types]
    bias = read.flag("attention_bias")
    config = pre_norm_decoder(
        read,
        windows=windows,
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        qkv_bias=bias,
        o_bias=bias,
        head_norm=NormSpec(eps=read.number("rms_norm_eps")),
    )
    return sigmoid_mixtures(read, config)


@register("glm4_moe", replace(PER_EXPERT, skip=(NEXT_TOKEN_LAYERS,)), architecture="Glm4MoeForCausalLM")
def glm4_moe(read: ConfigReader) -> ModelConfig:
    for key in ("num_mtp_layers", "num_nextn_predict_layers"):  # such a layer is skipped when the file has it
        read(key)
    config = pre_norm_decoder(
        read,
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        qkv_bias=read.flag("attention_bias"),
        head_norm=NormSpec(eps=read.number("rms_norm_eps")) if read.flag("use_qk_norm") else None,
        partial=read.given("partial_rotary_factor", 0.5),
    )
    return sigmoid_mixtures(read, config)
