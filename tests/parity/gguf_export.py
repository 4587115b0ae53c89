"""Writes a transformers model as GGUF, by llama.cpp's own table of names and not by plait's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gguf_files import write_gguf

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "mixtral": "llama",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}


def write_model(
    model: Any, path: Path, divisors: NDArray | None = None, old_experts: bool = False, **metadata: Any
) -> Path:
    """The model's weights in fp32; divisors: the rope_freqs tensor. metadata: keys beside the common ones.

    old_experts: a tensor per expert, as converters wrote them before stacks had names.
    """
    import gguf

    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    enumeration = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(enumeration, config.num_hidden_layers)
    tensors: dict[str, NDArray] = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            tensors |= _expert_tensors(names, name, parameter.detach().numpy())
            continue
        stem, kind = name.rsplit(".", 1)
        target = names.get_name(stem)
        assert target is not None, name
        tensors[f"{target}.{kind}"] = _converted(config, name, parameter.detach().numpy())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensors[f"{names.get_name(name.removesuffix('_bias'))}.bias"] = buffer.numpy()
    if "attention.key_length_mla" in metadata:
        for name in [name for name in tensors if name.endswith("attn_kv_b.weight")]:
            tensors |= _split_kv_b(config, name, tensors.pop(name))
    if old_experts:
        stacks = [name for name in tensors if "_exps" in name]
        for name in stacks:
            tensors |= {name.replace("_exps", f".{e}"): value for e, value in enumerate(tensors.pop(name))}
    if divisors is not None:
        tensors["rope_freqs.weight"] = divisors
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    keys = {f"{architecture}.{key}": value for key, value in {**_common(config), **metadata}.items()}
    keys["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(config.vocab_size)]
    return write_gguf(path, keys, tensors, architecture)


def _expert_tensors(names: Any, name: str, value: NDArray) -> dict[str, NDArray]:
    """A stack under its names in GGUF, which has gate and up apart."""
    stem, kind = name.rsplit(".", 1)
    parts = (
        {"down_proj": value}
        if kind == "down_proj"
        else dict(zip(("gate_proj", "up_proj"), np.split(value, 2, 1), strict=True))
    )
    return {f"{names.get_name(f'{stem}.{part}')}.weight": np.ascontiguousarray(t) for part, t in parts.items()}


def _split_kv_b(config: Any, name: str, value: NDArray) -> dict[str, NDArray]:
    """As converters since 2025 write it: of each head what makes keys, transposed, and what makes values."""
    heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    k, v = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {
        name.replace("kv_b", "k_b"): np.ascontiguousarray(k.transpose(0, 2, 1)),
        name.replace("kv_b", "v_b"): np.ascontiguousarray(v),
    }


def _converted(config: Any, name: str, value: NDArray) -> NDArray:
    """What llama.cpp's converters do: llama's q and k rows are paired up, Gemma's norms gain 1, NeoX's q, k, v part."""
    heads = config.num_attention_heads
    if name.endswith("shared_expert_gate.weight"):
        return value[0]  # converters squeeze
    if config.model_type in ("llama", "mixtral", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
        count = heads if "q_proj" in name else config.num_key_value_heads
        return value.reshape(count, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if config.model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return value + 1
    if "query_key_value" in name:
        return value.reshape(heads, 3, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)
    return value


def _common(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
    }
    if config.model_type == "gpt_neox":
        return {**keys, "attention.layer_norm_epsilon": config.layer_norm_eps}
    if config.model_type == "starcoder2":
        kv = {"attention.head_count_kv": config.num_key_value_heads}
        return {**keys, **kv, "attention.layer_norm_epsilon": config.norm_epsilon}
    if config.model_type.startswith("deepseek"):
        return keys | _latent(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        **keys,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": width,
    }


def _latent(config: Any) -> dict[str, Any]:
    """Of older files, which describe the heads."""
    sigmoid = config.model_type == "deepseek_v3"
    keys = {
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": sigmoid and config.norm_topk_prob,
    }
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    return keys | ({"expert_gating_func": 2} if sigmoid else {})
