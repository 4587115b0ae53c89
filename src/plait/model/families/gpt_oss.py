"""gpt-oss: attention sinks, windows on every second layer, experts with biases behind a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError
from plait.model.config import MixtureSpec, ModelConfig, NormSpec
from plait.model.expert_names import interleaved_place
from plait.model.families import register
from plait.model.families.llama import activation, each_attention, pre_norm_decoder, require_window
from plait.model.families.mixture import num_experts, router, with_mixtures
from plait.model.name_map import NameMap, Rule, paired
from plait.model.reader import ConfigReader

_MLP = "model.layers.{i}.mlp"
# The files keep experts as [E, in, out], and the columns of gate and up take turns.
NAMES = NameMap(
    rules=(
        *paired(f"{_MLP}.router", f"{_MLP}.gate", ("weight", "bias")),
        *(
            Rule(f"{_MLP}.experts.{name}", (f"{_MLP}.experts.{name}",), place=interleaved_place)
            for name in ("gate_up_proj", "gate_up_proj_bias")
        ),
    ),
    transposed=(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj",),
)
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _rope(read: ConfigReader) -> Mapping[str, Any]:
    return read.rope_block() or _DEFAULT_ROPE


@register("gpt_oss", NAMES, architecture="GptOssForCausalLM")
def gpt_oss(read: ConfigReader) -> ModelConfig:
    num_layers = read.num_layers()
    window = read.integer("sliding_window", 0)
    types = read.layer_types(num_layers) or ["sliding_attention", "full_attention"] * num_layers
    require_window(window, types[:num_layers])
    bias = read.flag("attention_bias")
    config = pre_norm_decoder(
        read,
        windows=[window if kind == "sliding_attention" else 0 for kind in types[:num_layers]],
        head_width=_head_width(read),
        kv_heads=read.integer("num_key_value_heads", read.integer("num_attention_heads")),
        qkv_bias=bias,
        o_bias=bias,
        norm=NormSpec(eps=read.number("rms_norm_eps"), fp32_weight=True),
        theta=150_000.0,
        rope=_rope(read),
    )
    other, own = read.given("experts_per_token", None), read("num_experts_per_tok")
    if other is not None and other != own:
        raise ConfigError(
            f"experts_per_token={other!r} and num_experts_per_tok={own!r} are two spellings of one key and differ"
        )
    if activation(read) != "silu":
        raise ConfigError(f"hidden_act={read('hidden_act')!r}: a gpt_oss has one activation, and calls it silu")
    read("initial_context_length")  # what the rope block says too
    mixture = MixtureSpec(
        router(read, num_experts(read, "num_local_experts", "num_experts"), scores="topk_softmax", renormalise="never"),
        read.integer("intermediate_size"),
        "clamped_swiglu",
        up_bias=True,
        down_bias=True,
        router_bias=True,
        alpha=read.number("swiglu_alpha"),
        limit=read.positive("swiglu_limit"),
    )
    return with_mixtures(each_attention(config, sinks=True), mixture)


def _head_width(read: ConfigReader) -> int | None:
    """Absent is the class's own default, null is hidden / heads."""
    return None if "head_dim" in read.raw and read.raw["head_dim"] is None else read.integer("head_dim")
