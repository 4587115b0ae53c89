"""Which GGUF architecture a model is, and its metadata: the reverse of plait.weights.gguf_config, from the switches.

An architecture is one entry of `WRITERS`: the model types that it stands for and the functions that give its keys,
written without its prefix. What llama.cpp fixes in code has no key; whether the keys say all that the model does is
not trusted but checked: `gguf_metadata` reads them back and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import ConfigError
from plait.model.config import AttentionSpec, LatentAttentionSpec, MixtureSpec, ModelConfig, RotarySpec
from plait.model.families import family, parse_config
from plait.model.rope import rotary_numbers
from plait.weights.gguf_config import gguf_config
from plait.weights.gguf_dense import FACTORS
from plait.weights.gguf_writer.deepseek import last_mixture, latent_experts, latent_sizes, yarn_multiplier
from plait.weights.original_config import first_difference
from plait.weights.sources import TensorInfo

Keys = dict[str, Any]
KeysOf = Callable[[ModelConfig], Keys]
Tables = dict[str, NDArray[np.float32]]

DIVISORS = "rope_freqs.weight"


def _attention(config: ModelConfig) -> AttentionSpec:
    """Of the first layer that rotates."""
    found = next((each.attention for each in config.layers if each.attention.rotary), config.layers[0].attention)
    if isinstance(found, LatentAttentionSpec):
        raise ConfigError(f"{config.model_type} cannot be written as GGUF yet: it has latent attention")
    return found


def _sizes(config: ModelConfig) -> Keys:
    a, f = _attention(config), config.layers[-1].feed_forward
    width = config.raw.get("intermediate_size") if isinstance(f, MixtureSpec) else None
    return {
        "block_count": len(config.layers),
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": f.width if width is None else width,
        "vocab_size": config.vocab_size,
        "attention.head_count": a.num_heads,
        "attention.key_length": a.key_width,
        "attention.value_length": a.value_width,
    }


def _grouped(config: ModelConfig) -> Keys:
    return {**_sizes(config), "attention.head_count_kv": _attention(config).num_kv_heads}


def _rms(config: ModelConfig) -> Keys:
    return {"attention.layer_norm_rms_epsilon": float(config.final_norm.eps)}


def _layer_norm(config: ModelConfig) -> Keys:
    return {"attention.layer_norm_epsilon": float(config.final_norm.eps)}


def _rope(config: ModelConfig) -> Keys:
    """The rotary table of full attention; llama3's scaling and longrope's are tensors (`rotary_tensors`)."""
    spec = config.rotary[0]
    keys: Keys = {"rope.dimension_count": spec.width, "rope.freq_base": float(spec.theta)}
    scaling = spec.scaling
    if spec.rope_type == "linear" and spec.divisors is None:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    if spec.rope_type == "yarn":
        original = int(scaling["original_max_position_embeddings"])
        factor = scaling.get("factor") or spec.max_positions / original
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(factor)}
        keys["rope.scaling.original_context_length"] = original
        for key, ours in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            if scaling.get(ours):
                keys[f"rope.scaling.yarn_{key}"] = float(scaling[ours])
    return keys


def _experts(config: ModelConfig) -> Keys:
    """Of a mixture: how many experts, how many for a token, and their width."""
    mixture = config.layers[-1].feed_forward
    if not isinstance(mixture, MixtureSpec):
        return {}
    return {"expert_count": mixture.router.num_experts, "expert_used_count": mixture.router.top_k}


def _expert_widths(config: ModelConfig) -> Keys:
    mixture = last_mixture(config)
    keys = {"expert_feed_forward_length": mixture.width}
    return keys | ({"expert_shared_feed_forward_length": mixture.shared.width} if mixture.shared else {})


def _window(config: ModelConfig) -> Keys:
    window = max(layer.attention.window for layer in config.layers)
    return {"attention.sliding_window": window} if window else {}


def _gemma2(config: ModelConfig) -> Keys:
    return {
        "attention.sliding_window": max(layer.attention.window for layer in config.layers),
        "attn_logit_softcapping": float(_attention(config).soft_cap),
        "final_logit_softcapping": float(config.logit_soft_cap),
    }


def _gemma3(config: ModelConfig) -> Keys:
    keys = _window(config)
    if config.rotary[1].theta != 10_000.0:
        keys["rope.freq_base_swa"] = float(config.rotary[1].theta)
    return keys | ({"final_logit_softcapping": float(config.logit_soft_cap)} if config.logit_soft_cap else {})


def _phi3(config: ModelConfig) -> Keys:
    spec, keys = config.rotary[0], _window(config)
    if spec.rope_type != "longrope":
        return {**keys, "rope.scaling.original_context_length": config.max_positions}
    original = int(spec.scaling["original_max_position_embeddings"])
    magnitude = rotary_numbers(spec)[1]
    return {**keys, "rope.scaling.original_context_length": original, "rope.scaling.attn_factor": float(magnitude)}


def _granite(config: ModelConfig) -> Keys:
    return {
        "embedding_scale": float(config.embedding_scale),
        "attention.scale": float(_attention(config).scale),
        "residual_scale": float(config.layers[0].branch_scale),
        "logit_scale": float(1.0 / config.logit_scale),
    }


def _gptneox(config: ModelConfig) -> Keys:
    return {"use_parallel_residual": config.layers[0].parallel}


@dataclass(frozen=True)
class Writer:
    """How one `general.architecture` is written: the model types that it stands for and the keys, by parts."""

    model_types: tuple[str, ...]
    keys: tuple[KeysOf, ...]


_LLAMA = (_grouped, _rms, _rope)

WRITERS: Mapping[str, Writer] = {
    "llama": Writer(("llama", "mistral", "mixtral"), (*_LLAMA, _experts)),
    "qwen2": Writer(("qwen2",), _LLAMA),
    "qwen3": Writer(("qwen3",), _LLAMA),
    "qwen2moe": Writer(("qwen2_moe",), (*_LLAMA, _experts, _expert_widths)),
    "qwen3moe": Writer(("qwen3_moe",), (*_LLAMA, _experts, _expert_widths)),
    "olmoe": Writer(("olmoe",), (*_LLAMA, _experts)),
    "gemma2": Writer(("gemma2",), (*_LLAMA, _gemma2)),
    "gemma3": Writer(("gemma3_text",), (*_LLAMA, _gemma3)),
    "phi3": Writer(("phi3",), (*_LLAMA, _phi3)),
    "olmo2": Writer(("olmo2",), _LLAMA),
    "starcoder2": Writer(("starcoder2",), (_grouped, _layer_norm, _rope)),
    "granite": Writer(("granite",), (*_LLAMA, _granite)),
    "smollm3": Writer(("smollm3",), _LLAMA),
    "gptneox": Writer(("gpt_neox",), (_sizes, _layer_norm, _rope, _gptneox)),
    "deepseek2": Writer(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"), (latent_sizes, _rms, _rope, yarn_multiplier, latent_experts)
    ),
}


def architecture_of(config: ModelConfig) -> str:
    """The `general.architecture` of a model. Raises ConfigError, naming the family, where there is none."""
    for name, writer in WRITERS.items():
        if config.model_type in writer.model_types:
            return name
    if family(config.model_type).is_own:
        raise ConfigError(
            f"{config.model_type} is plait's own family and has no class elsewhere, in GGUF neither: plait serves its"
            " directory as it is; to export a study, train a llama, qwen3, mixtral or qwen3_moe"
        )
    known = ", ".join(sorted(kind for writer in WRITERS.values() for kind in writer.model_types))
    raise ConfigError(
        f"model_type {config.model_type!r} cannot be written as GGUF: plait has no architecture for it (it has {known})"
    )


def rotary_tensors(config: ModelConfig) -> Tables:
    """The rotary divisors that GGUF keeps as tensors: by name, float32 [pairs]; {} for scalings that are keys."""
    spec = config.rotary[0] if config.rotary else None
    if spec is None:
        return {}
    if spec.divisors is not None:
        return {DIVISORS: np.array(spec.divisors, np.float32)}
    if spec.rope_type == "llama3":
        return {DIVISORS: _divisors_of(spec)}
    if spec.rope_type == "longrope":
        sets = {name: np.array(spec.scaling[key], np.float32) for key, name in FACTORS.items()}
        short, long = sets.values()
        if config.model_type == "phi3":
            return sets
        if np.array_equal(short, long) and rotary_numbers(spec)[1] == 1.0:
            return {DIVISORS: short}
        raise ConfigError(f"rope_type='longrope' of a {config.model_type} has no place in GGUF: only phi3's has")
    if spec.rope_type not in ("default", "linear", "yarn"):
        raise ConfigError(f"rope_type={spec.rope_type!r} has no place in GGUF")
    return {}


def _divisors_of(spec: RotarySpec) -> NDArray[np.float32]:
    """What divides the plain frequencies, so that theirs come out."""
    plain = replace(spec, rope_type="default", scaling={})
    base, found = (rotary_numbers(each)[0].astype(np.float64) for each in (plain, spec))
    return (base / found).astype(np.float32)


def architecture_keys(config: ModelConfig, tensors: Mapping[str, TensorInfo], tables: Tables) -> Keys:
    """The architecture's metadata, prefixed; tensors: descriptions of all that the file will hold.

    Raises ConfigError where the keys cannot say what the model does, naming what: they are read back as plait reads any
    GGUF file, and the result is compared.
    """
    name = architecture_of(config)
    keys: Keys = {"general.architecture": name}
    for part in WRITERS[name].keys:
        keys |= {f"{name}.{key}": value for key, value in part(config).items()}
    raw = gguf_config(keys, tensors)
    if "longrope" in (raw.get("rope_scaling") or {}).values():
        raw["rope_scaling"] |= {key: tables[table].tolist() for key, table in FACTORS.items()}
    read = parse_config(raw)
    if DIVISORS in tables:
        first, *others = read.rotary
        read = replace(read, rotary=(replace(first, divisors=tuple(tables[DIVISORS].tolist())), *others))
    difference = first_difference(config, read)
    if difference is not None:
        raise ConfigError(
            f"this {config.model_type} cannot be written as GGUF: {difference} as the architecture {name!r} has it"
        )
    return keys
