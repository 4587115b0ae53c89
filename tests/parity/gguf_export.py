"""Writes a transformers model as GGUF, by llama.cpp's own table of names and not by plait's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tests.gguf_files import write_gguf

ARCHITECTURES = {"gemma3_text": "gemma3", "gpt_neox": "gptneox"}


def write_model(model: Any, path: Path, divisors: NDArray | None = None, **metadata: Any) -> Path:
    """The model's weights in fp32; divisors: the rope_freqs tensor. metadata: keys beside the common ones."""
    import gguf

    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    enumeration = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(enumeration, config.num_hidden_layers)
    tensors: dict[str, NDArray] = {}
    for name, parameter in model.named_parameters():
        stem, kind = name.rsplit(".", 1)
        target = names.get_name(stem)
        assert target is not None, name
        tensors[f"{target}.{kind}"] = _converted(config, name, parameter.detach().numpy())
    if divisors is not None:
        tensors["rope_freqs.weight"] = divisors
    keys = {f"{architecture}.{key}": value for key, value in {**_common(config), **metadata}.items()}
    keys["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(config.vocab_size)]
    return write_gguf(path, keys, tensors, architecture)


def _converted(config: Any, name: str, value: NDArray) -> NDArray:
    """What llama.cpp's converters do: llama's q and k rows are paired up, Gemma's norms gain 1, NeoX's q, k, v part."""
    heads = config.num_attention_heads
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        count = heads if "q_proj" in name else config.num_key_value_heads
        return value.reshape(count, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
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
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        **keys,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": width,
    }
