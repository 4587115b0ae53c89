"""GGUF metadata -> the config.json dictionary of the Hugging Face model, so that families are described only once.

One `Architecture` per `general.architecture`: a table of rows (GGUF key without its prefix, config.json key, type,
default), constants that the architecture implies, and a short function for what is not one key to one key. Every key
under the architecture's prefix must be in a table: one that is not, or whose value asks for something else than plain
computation, is a ConfigError, because it may change the mathematics.

Facts are llama.cpp's reading of these keys. rope_freqs.weight (per-pair divisors, the result of llama3 scaling)
replaces every rope.scaling key; `weights/checkpoint.py` puts its values into the rotary table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError
from plait.model.reader import MAX_LAYERS
from plait.weights.gguf_deepseek import DEEPSEEK
from plait.weights.gguf_dense import DENSE
from plait.weights.gguf_keys import (
    ATTENTION,
    FEED_FORWARD,
    GROUPED,
    REQUIRED,
    ROPE,
    SIZES,
    Architecture,
    Reader,
    Row,
    bias_switch,
    fraction_of,
    head_dim,
    rope_scaling,
    shortest_float32,
)
from plait.weights.gguf_mixtures import MIXTURES, WITH_EXPERTS
from plait.weights.sources import TensorInfo

__all__ = ["ARCHITECTURES", "fraction_of", "gguf_config", "shortest_float32"]

# Keys that are allowed only with a value that changes nothing; (key, harmless values, what another value would mean).
_HARMLESS = (
    ("expert_count", (0,), "a mixture of experts, which is not supported for this architecture yet"),
    ("expert_used_count", (0,), "a mixture of experts, which is not supported for this architecture yet"),
    ("expert_shared_count", (0,), "shared experts, which are not supported for this architecture yet"),
    ("expert_gating_func", (0, 1), "a router that is no softmax, which is not supported for this architecture yet"),
    ("expert_weights_scale", (0.0, 1.0), "a factor on the experts' weights: not supported for this architecture yet"),
    ("expert_group_count", (0, 1), "groups of experts: not supported for this architecture yet"),
    ("expert_group_used_count", (0, 1), "groups of experts: not supported for this architecture yet"),
    ("nextn_predict_layers", (0,), "multi-token prediction layers: not supported yet"),
    ("attention.causal", (True,), "attention that is not causal"),
    ("attention.clamp_kqv", (0.0,), "clipping of q, k and v"),
    ("attention.max_alibi_bias", (0.0,), "ALiBi"),
    ("attention.sliding_window", (0,), "a sliding window, which this architecture does not have"),
    ("attn_logit_softcapping", (0.0,), "soft-capped attention"),
    ("use_parallel_residual", (False,), "parallel residuals, which this architecture does not have"),
    ("rope.scaling.attn_factor", (0.0, 1.0), "a rotary magnitude of its own"),
    ("rope.scaling.yarn_attn_factor", (0.0, 1.0), "a rotary magnitude of its own"),
    ("rope.scaling.yarn_ext_factor", (-1.0, 1.0), "a partial YaRN mix"),
    ("rope.scaling.yarn_log_multiplier", (0.0,), "a YaRN softmax correction"),
    ("rope.scaling.alpha", (0.0, 1.0), "NTK scaling by alpha"),
)
# Keys that cannot change the logits.
_IGNORED = ("tensor_data_layout", "pooling_type", "rope.scaling.finetuned")


def gguf_config(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config.json dictionary (Hugging Face spelling) of a GGUF file.

    metadata: the file's key/value pairs. tensors: its tensors by name; they tell the vocabulary's size, whether the
    head is tied, and which biases exist. Raises ConfigError naming the architecture or key that is not supported.
    """
    name = metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is not None and metadata.get(f"{name}.expert_count"):
        architecture = WITH_EXPERTS.get(str(name), architecture)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"GGUF architecture {name!r:.80} is not supported yet (supported: {known})")
    read = Reader(metadata, tensors, str(name))
    for key in {"expert_count", "expert_used_count"} - {row.key for row in architecture.rows}:
        _check_harmless(read, key)
    config: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.class_name]}
    for row in architecture.rows:
        value = read.get(row.key, row.type, row.default)
        config[row.target] = config[value[1:]] if isinstance(value, str) and value.startswith("=") else value
    _check_sizes(read, config)
    config |= architecture.constants
    config["vocab_size"] = _vocab_size(read)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config |= _special_tokens(metadata)
    architecture.finish(read, config)
    _check_rest(read)
    return config


def _check_sizes(read: Reader, config: dict[str, Any]) -> None:
    for target, value in config.items():
        if type(value) is int and value < 1:
            raise read.error(f"{target} is {value}, which must be at least 1")
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise read.error(f"block_count is {config['num_hidden_layers']}; at most {MAX_LAYERS} are allowed")


def _vocab_size(read: Reader) -> int:
    """Rows of the embedding; the key and the token list are only asked when there is none."""
    key = read.get("vocab_size", int)
    embedding = read.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        rows = embedding.shape[0]
        if key is not None and key != rows:
            raise read.error(f"vocab_size is {key}, but token_embd.weight has {rows} rows")
        return rows
    if key is not None:
        return key
    tokens = read.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise read.error("neither token_embd.weight, vocab_size nor tokenizer.ggml.tokens tells the vocabulary's size")
    return len(tokens)


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    def token(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    ends = [end for end in dict.fromkeys(token(name) for name in ("eos", "eot", "eom")) if end is not None]
    eos = ends if len(ends) > 1 else (ends[0] if ends else None)
    return {"bos_token_id": token("bos"), "eos_token_id": eos, "pad_token_id": token("padding")}


def _check_harmless(read: Reader, only: str | None = None) -> None:
    for key, harmless, meaning in _HARMLESS:
        if key in read.seen or (only is not None and key != only):
            continue
        value = read.get(key, type(harmless[0]), harmless[0])
        if value not in harmless:
            raise ConfigError(f"GGUF metadata: {read.prefix}.{key} is {value!r}: {meaning}")


def _check_rest(read: Reader) -> None:
    _check_harmless(read)
    own = read.prefix + "."
    rest = [key for key in read.metadata if key.startswith(own) and key[len(own) :] not in read.seen]
    unknown = [key for key in rest if key[len(own) :] not in _IGNORED]
    if unknown:
        raise ConfigError(f"GGUF metadata: keys that are not understood: {', '.join(sorted(unknown)):.300}")


def _llama(read: Reader, config: dict[str, Any]) -> None:
    config["head_dim"] = head_dim(read, config)
    config["attention_bias"] = bias_switch(read, config, ATTENTION)
    config["mlp_bias"] = bias_switch(read, config, FEED_FORWARD)
    rope_scaling(read, config)


def _qwen2(read: Reader, config: dict[str, Any]) -> None:
    width = head_dim(read, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    rope_scaling(read, config)


def _qwen3(read: Reader, config: dict[str, Any]) -> None:
    config["head_dim"] = head_dim(read, config)
    config["attention_bias"] = bias_switch(read, config, ATTENTION)
    rope_scaling(read, config)


def _gemma3(read: Reader, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    width = head_dim(read, config)
    config["head_dim"] = width
    # Only the 27B (62 layers) scales by the width that hidden / heads would give; no key says so.
    config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else width
    window = read.get("attention.sliding_window", int, 0)
    full = ["full_attention"] * layers
    config["sliding_window"] = window or None
    config["layer_types"] = _gemma3_layers(read, layers) if window else full
    if not window:
        read.seen.add("attention.sliding_window_pattern")
    config["final_logit_softcapping"] = read.get("final_logit_softcapping", float, 0.0) or None
    rope_scaling(read, config)


def _gemma3_layers(read: Reader, layers: int) -> list[str]:
    """attention.sliding_window_pattern: every n-th layer is full (default 6), or a bool per layer, true = windowed."""
    key = "attention.sliding_window_pattern"
    stored = read.metadata.get(f"{read.prefix}.{key}")
    if isinstance(stored, list):
        read.seen.add(key)
        if len(stored) != layers:
            raise read.error(f"{key} has {len(stored)} entries for {layers} layers")
        windowed = [bool(entry) for entry in stored]
    else:
        period = read.get(key, int, 6)
        windowed = [period > 0 and bool((layer + 1) % period) for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def _gptneox(read: Reader, config: dict[str, Any]) -> None:
    width = head_dim(read, config, rotate_whole=False)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        raise read.error(f"attention.key_length {width} is not embedding_length / attention.head_count: not supported")
    rotary = read.get("rope.dimension_count", int, REQUIRED)
    if not 0 < rotary <= width or rotary % 2:
        raise read.error(f"rope.dimension_count is {rotary} of a head's {width}; it must be even and fit")
    config["rotary_pct"] = fraction_of(rotary, width)
    rope_scaling(read, config)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", GROUPED + ROPE, {"hidden_act": "silu"}, _llama),
    "qwen2": Architecture(
        "qwen2", "Qwen2ForCausalLM", GROUPED + ROPE, {"hidden_act": "silu", "use_sliding_window": False}, _qwen2
    ),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", GROUPED + ROPE, {"hidden_act": "silu", "use_sliding_window": False}, _qwen3
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            *GROUPED,
            Row("rope.freq_base", "rope_theta", float, 1_000_000.0),
            Row("rope.freq_base_swa", "rope_local_base_freq", float, 10_000.0),
        ),
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        _gemma3,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        (
            *SIZES,
            Row("attention.layer_norm_epsilon", "layer_norm_eps", float),
            Row("rope.freq_base", "rotary_emb_base", float, 10_000.0),
            Row("use_parallel_residual", "use_parallel_residual", bool, True),
        ),
        {"hidden_act": "gelu", "attention_bias": True},
        _gptneox,
    ),
} | {**DENSE, **MIXTURES, **DEEPSEEK}
