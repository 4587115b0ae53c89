"""The parts that descriptions of GGUF architectures are made of: rows of keys, a reader that remembers what was asked
for, and the questions that many architectures share (plait.weights.gguf_config)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nextafter
from typing import Any

from plait.errors import ConfigError
from plait.weights.sources import TensorInfo

REQUIRED = object()


@dataclass(frozen=True)
class Row:
    """One key that becomes one key. default: the value when absent, the name of another config key to copy ("=name"),
    or REQUIRED."""

    key: str
    target: str
    type: type
    default: Any = REQUIRED


SIZES = (
    Row("block_count", "num_hidden_layers", int),
    Row("context_length", "max_position_embeddings", int),
    Row("embedding_length", "hidden_size", int),
    Row("feed_forward_length", "intermediate_size", int),
    Row("attention.head_count", "num_attention_heads", int),
)
GROUPED = (
    *SIZES,
    Row("attention.head_count_kv", "num_key_value_heads", int, "=num_attention_heads"),
    Row("attention.layer_norm_rms_epsilon", "rms_norm_eps", float),
)
ROPE = (Row("rope.freq_base", "rope_theta", float, 10000.0),)


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` reads: rows, implied constants, and the rest."""

    model_type: str
    class_name: str
    rows: tuple[Row, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Reader, dict[str, Any]], None] = lambda read, config: None


class Reader:
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
            if default is REQUIRED:
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


def shortest_float32(value: float) -> float:
    """The number with the fewest digits that a float32 stores as `value`: 1e-05 instead of 9.999999747378752e-06."""
    import numpy as np

    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else float(value)


def head_dim(read: Reader, config: dict[str, Any], rotate_whole: bool = True) -> int:
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


def rope_scaling(read: Reader, config: dict[str, Any]) -> None:
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


def bias_switch(read: Reader, config: dict[str, Any], names: tuple[str, ...]) -> bool:
    """Whether these projections have biases: all of them in all layers, or none anywhere."""
    layers = config["num_hidden_layers"]
    counts = {name: read.layers_with(f"{name}.bias", layers) for name in names}
    if not any(counts.values()):
        return False
    if all(count == layers for count in counts.values()):
        return True
    shown = ", ".join(f"{name} in {count}" for name, count in counts.items())
    raise read.error(f"biases on a part of the projections ({shown} of {layers} layers): not supported yet")


ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


def fraction_of(part: int, whole: int) -> float:
    """A float f with int(whole * f) == part: Hugging Face's configs say the rotary width in this way."""
    fraction = part / whole
    while int(whole * fraction) < part:
        fraction = nextafter(fraction, 2.0)
    return fraction
