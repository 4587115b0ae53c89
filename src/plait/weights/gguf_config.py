"""GGUF metadata -> the config.json dictionary of the Hugging Face model, so that families are described only once.

One `Architecture` per `general.architecture`: a table of rows (GGUF key without its prefix, config.json key, type,
default), constants that the architecture implies, and a short function for what is not one key to one key. Every key
under the architecture's prefix must be in a table: one that is not, or whose value asks for something else than plain
computation, is a ConfigError, because it may change the mathematics.

Facts are llama.cpp's reading of these keys. rope_freqs.weight (per-pair divisors, the result of llama3 scaling)
replaces every rope.scaling key; `weights/checkpoint.py` puts its values into the rotary table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nextafter
from typing import Any

from plait.errors import ConfigError
from plait.model.reader import MAX_LAYERS
from plait.weights.sources import TensorInfo

_REQUIRED = object()


@dataclass(frozen=True)
class Row:
    """One key that becomes one key. default: the value when absent, the name of another config key to copy ("=name"),
    or _REQUIRED."""

    key: str
    target: str
    type: type
    default: Any = _REQUIRED


_SIZES = (
    Row("block_count", "num_hidden_layers", int),
    Row("context_length", "max_position_embeddings", int),
    Row("embedding_length", "hidden_size", int),
    Row("feed_forward_length", "intermediate_size", int),
    Row("attention.head_count", "num_attention_heads", int),
)
_GROUPED = (
    *_SIZES,
    Row("attention.head_count_kv", "num_key_value_heads", int, "=num_attention_heads"),
    Row("attention.layer_norm_rms_epsilon", "rms_norm_eps", float),
)
_ROPE = (Row("rope.freq_base", "rope_theta", float, 10000.0),)

# Keys that are allowed only with a value that changes nothing; (key, harmless values, what another value would mean).
_HARMLESS = (
    ("expert_count", (0,), "mixture of experts: not supported yet"),
    ("expert_used_count", (0,), "mixture of experts: not supported yet"),
    ("expert_shared_count", (0,), "mixture of experts: not supported yet"),
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


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` reads: rows, implied constants, and the rest."""

    model_type: str
    class_name: str
    rows: tuple[Row, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[_Reader, dict[str, Any]], None] = lambda read, config: None


class _Reader:
    """The keys of one architecture; remembers which were asked for."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], prefix: str) -> None:
        self.metadata = metadata
        self.tensors = tensors
        self.prefix = prefix
        self.seen: set[str] = set()

    def get(self, key: str, kind: Any, default: Any = None) -> Any:
        """A value of the wanted type, or the default; an array of equal values counts as that value."""
        self.seen.add(key)
        name = f"{self.prefix}.{key}"
        if name not in self.metadata:
            if default is _REQUIRED:
                raise ConfigError(f"GGUF metadata: the key {name} is missing")
            return default
        value = self.metadata[name]
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise ConfigError(f"GGUF metadata: {name} differs from layer to layer, which is not supported")
            value = value[0]
        if not isinstance(value, (int, float) if kind is float else kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise ConfigError(f"GGUF metadata: {name} is {value!r:.80}, not of type {kind.__name__}")
        return shortest_float32(float(value)) if kind is float else value

    def layers_with(self, suffix: str, num_layers: int) -> int:
        """In how many layers the tensor blk.N.`suffix` is present."""
        return sum(f"blk.{layer}.{suffix}" in self.tensors for layer in range(num_layers))

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"GGUF architecture {self.prefix!r}: {message}")


def gguf_config(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config.json dictionary (Hugging Face spelling) of a GGUF file.

    metadata: the file's key/value pairs. tensors: its tensors by name; they tell the vocabulary's size, whether the
    head is tied, and which biases exist. Raises ConfigError naming the architecture or key that is not supported.
    """
    name = metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"GGUF architecture {name!r:.80} is not supported yet (supported: {known})")
    read = _Reader(metadata, tensors, str(name))
    for key in ("expert_count", "expert_used_count"):
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


def shortest_float32(value: float) -> float:
    """The number with the fewest digits that a float32 stores as `value`: 1e-05 instead of 9.999999747378752e-06."""
    import numpy as np

    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else float(value)


def _check_sizes(read: _Reader, config: dict[str, Any]) -> None:
    for target, value in config.items():
        if type(value) is int and value < 1:
            raise read.error(f"{target} is {value}, which must be at least 1")
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise read.error(f"block_count is {config['num_hidden_layers']}; at most {MAX_LAYERS} are allowed")


def _vocab_size(read: _Reader) -> int:
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


def _check_harmless(read: _Reader, only: str | None = None) -> None:
    for key, harmless, meaning in _HARMLESS:
        if key in read.seen or (only is not None and key != only):
            continue
        value = read.get(key, type(harmless[0]), harmless[0])
        if value not in harmless:
            raise ConfigError(f"GGUF metadata: {read.prefix}.{key} is {value!r}: {meaning}")


def _check_rest(read: _Reader) -> None:
    _check_harmless(read)
    own = read.prefix + "."
    rest = [key for key in read.metadata if key.startswith(own) and key[len(own) :] not in read.seen]
    unknown = [key for key in rest if key[len(own) :] not in _IGNORED]
    if unknown:
        raise ConfigError(f"GGUF metadata: keys that are not understood: {', '.join(sorted(unknown)):.300}")


def _head_dim(read: _Reader, config: dict[str, Any], rotate_whole: bool = True) -> int:
    """attention.key_length, else hidden / heads; value_length and the rotary width must agree with it."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = read.get("attention.key_length", int)
    if width is None and hidden % heads:
        raise read.error(f"embedding_length {hidden} is not a multiple of attention.head_count {heads}")
    width = hidden // heads if width is None else width
    if width < 1:
        raise read.error(f"attention.key_length is {width}, which must be at least 1")
    value_width = read.get("attention.value_length", int, width)
    if value_width != width:
        raise read.error(f"attention.value_length {value_width} differs from the key's {width}: not supported")
    if rotate_whole:
        rotary = read.get("rope.dimension_count", int, width)
        if rotary != width:
            raise read.error(f"rope.dimension_count {rotary} differs from the head's {width}: not supported")
    return width


def _rope_scaling(read: _Reader, config: dict[str, Any]) -> None:
    """rope.scaling.* -> rope_scaling. No type means linear; a factor of 0 or 1 means no scaling."""
    kind = read.get("rope.scaling.type", str, "linear")
    legacy = read.get("rope.scale_linear", float, 0.0)
    factor = read.get("rope.scaling.factor", float, 0.0) or legacy
    original = read.get("rope.scaling.original_context_length", int)
    fast = read.get("rope.scaling.yarn_beta_fast", float)
    slow = read.get("rope.scaling.yarn_beta_slow", float)
    if kind not in ("none", "linear", "yarn"):
        raise read.error(f"rope.scaling.type {kind!r} is not supported yet")
    if "rope_freqs.weight" in read.tensors or kind == "none" or factor in (0.0, 1.0):
        return
    if kind == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    else:
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        scaling |= {} if fast is None else {"beta_fast": fast}
        scaling |= {} if slow is None else {"beta_slow": slow}
        config["rope_scaling"] = scaling


def _bias_switch(read: _Reader, config: dict[str, Any], names: tuple[str, ...]) -> bool:
    """Whether these projections have biases: all of them in all layers, or none anywhere."""
    layers = config["num_hidden_layers"]
    counts = {name: read.layers_with(f"{name}.bias", layers) for name in names}
    if not any(counts.values()):
        return False
    if all(count == layers for count in counts.values()):
        return True
    shown = ", ".join(f"{name} in {count}" for name, count in counts.items())
    raise read.error(f"biases on a part of the projections ({shown} of {layers} layers): not supported yet")


_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


def _llama(read: _Reader, config: dict[str, Any]) -> None:
    config["head_dim"] = _head_dim(read, config)
    config["attention_bias"] = _bias_switch(read, config, _ATTENTION)
    config["mlp_bias"] = _bias_switch(read, config, _FEED_FORWARD)
    _rope_scaling(read, config)


def _qwen2(read: _Reader, config: dict[str, Any]) -> None:
    width = _head_dim(read, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = width
    _rope_scaling(read, config)


def _qwen3(read: _Reader, config: dict[str, Any]) -> None:
    config["head_dim"] = _head_dim(read, config)
    config["attention_bias"] = _bias_switch(read, config, _ATTENTION)
    _rope_scaling(read, config)


def _gemma3(read: _Reader, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    width = _head_dim(read, config)
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
    _rope_scaling(read, config)


def _gemma3_layers(read: _Reader, layers: int) -> list[str]:
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


def _gptneox(read: _Reader, config: dict[str, Any]) -> None:
    width = _head_dim(read, config, rotate_whole=False)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        raise read.error(f"attention.key_length {width} is not embedding_length / attention.head_count: not supported")
    rotary = read.get("rope.dimension_count", int, _REQUIRED)
    if not 0 < rotary <= width or rotary % 2:
        raise read.error(f"rope.dimension_count is {rotary} of a head's {width}; it must be even and fit")
    config["rotary_pct"] = fraction_of(rotary, width)
    _rope_scaling(read, config)


def fraction_of(part: int, whole: int) -> float:
    """A float f with int(whole * f) == part: Hugging Face's configs say the rotary width in this way."""
    fraction = part / whole
    while int(whole * fraction) < part:
        fraction = nextafter(fraction, 2.0)
    return fraction


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _GROUPED + _ROPE, {"hidden_act": "silu"}, _llama),
    "qwen2": Architecture(
        "qwen2", "Qwen2ForCausalLM", _GROUPED + _ROPE, {"hidden_act": "silu", "use_sliding_window": False}, _qwen2
    ),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", _GROUPED + _ROPE, {"hidden_act": "silu", "use_sliding_window": False}, _qwen3
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            *_GROUPED,
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
            *_SIZES,
            Row("attention.layer_norm_epsilon", "layer_norm_eps", float),
            Row("rope.freq_base", "rotary_emb_base", float, 10_000.0),
            Row("use_parallel_residual", "use_parallel_residual", bool, True),
        ),
        {"hidden_act": "gelu", "attention_bias": True},
        _gptneox,
    ),
}
