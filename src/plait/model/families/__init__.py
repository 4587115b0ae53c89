"""The registry: model_type -> a function from config.json to `ModelConfig`, and the name map of its files.

A new family is one function decorated with `@register` in a module of this package (named in `_MODULES`);
ARCHITECTURE.md lists the few tables around it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from plait.errors import ConfigError
from plait.model.config import ModelConfig, check
from plait.model.name_map import ROTARY_BUFFERS, NameMap
from plait.model.quantisation import read_quantisation, without_quantisation
from plait.model.reader import ConfigReader

_MODULES = (
    *("llama", "llama_like", "qwen", "gemma", "gpt_neox", "phi", "olmo", "cohere", "glm", "layer_norm", "gpt"),
    *("mixture", "falcon", "deepseek", "gpt_oss", "phimoe", "ernie", "apertus", "plait_gpt"),
)

# Families that need more than switches, and what they would need.
REFUSED = {
    "gemma4": "per-layer embeddings and shared key/value layers",
    "qwen3_5": "gated delta-rule layers",
    "qwen3_next": "gated delta-rule layers",
    "llama4": "chunked attention and temperature tuning",
    "minimax_m2": "partial q/k norms over the whole projection with sigmoid routing",
    "deepseek_v32": "attention to the keys that an indexer chooses",
    "kimi_linear": "gated delta-rule layers",
    "lfm2": "convolutional layers",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "jamba": "state-space layers",
    "zamba2": "state-space layers",
    "bamba": "state-space layers",
    "falcon_h1": "state-space layers",
    "nemotron_h": "state-space layers",
    "rwkv": "recurrent layers",
}


# Keys of a multimodal config.json that concern its text part and may stand outside text_config.
_OUTER_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


@dataclass(frozen=True)
class Family:
    """What is known of one model_type.

    build: ConfigReader -> ModelConfig. names: the map of Hugging Face files. architecture: the class that transformers
    loads it with, for `save_pretrained`; written_as: the model_type by which transformers knows that class. proved_on:
    for `plait models`. tie_key: the key of a tied head. keys: of a family that is plait's own, every key with its
    default; such a family has no class elsewhere (architecture is ""), and any other key is refused.
    """

    model_type: str
    build: Callable[[ConfigReader], ModelConfig]
    names: NameMap
    architecture: str
    proved_on: str
    written_as: str
    tie_key: str = "tie_word_embeddings"
    keys: Mapping[str, Any] | None = None

    @property
    def is_own(self) -> bool:
        """Whether only plait knows this family."""
        return self.keys is not None


_REGISTRY: dict[str, Family] = {}


def register(
    model_type: str,
    names: NameMap | None = None,
    *,
    architecture: str = "",
    proved_on: str = "random weights",
    written_as: str | None = None,
    tie_key: str = "tie_word_embeddings",
    keys: Mapping[str, Any] | None = None,
) -> Callable[[Callable[[ConfigReader], ModelConfig]], Callable[[ConfigReader], ModelConfig]]:
    """Register a family under its `model_type`. Rotary buffers of old checkpoints are skipped for every family."""

    def add(build: Callable[[ConfigReader], ModelConfig]) -> Callable[[ConfigReader], ModelConfig]:
        own = names or NameMap()
        own = replace(own, skip=(*own.skip, *ROTARY_BUFFERS))
        assert bool(architecture) == (keys is None), "a class elsewhere, or keys of one's own"
        written = written_as or model_type
        _REGISTRY[model_type] = Family(model_type, build, own, architecture, proved_on, written, tie_key, keys)
        return build

    return add


def families() -> Mapping[str, Family]:
    """Every registered family by model_type."""
    for module in _MODULES:
        import_module(f"{__name__}.{module}")
    return _REGISTRY


def family(model_type: str) -> Family:
    """The family, or an error that lists the known ones and the nearest match."""
    known = families()
    if model_type in known:
        return known[model_type]
    if model_type in REFUSED:
        raise ConfigError(f"model_type {model_type!r} is not supported: it needs {REFUSED[model_type]}")
    near = difflib.get_close_matches(model_type, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown model_type {model_type!r}{hint} (known: {', '.join(sorted(known))})")


def parse_config(raw: Mapping[str, Any], strict: bool = False) -> ModelConfig:
    """A `ModelConfig` from the dictionary of a config.json.

    A multimodal directory whose text part is a registered family is read as that text part (its other tensors are on
    the skip list). What it says of quantised weights is judged, and not in the result. Raises ConfigError naming the
    key or family that cannot be carried out.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError("config.json must hold a JSON object")
    model_type = raw.get("model_type")
    if model_type is None or model_type == "":
        raise ConfigError("config.json has no model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"model_type={model_type!r} in config.json must be text")
    read_quantisation(raw, strict, warn=True)  # judged, and then of no concern to the model
    raw = without_quantisation(raw)
    if model_type == "gemma3" and isinstance(raw.get("text_config"), Mapping):
        outer = {key: raw[key] for key in _OUTER_KEYS if key in raw}
        return parse_config({**outer, **raw["text_config"], "model_type": "gemma3_text"}, strict)
    found = family(model_type)
    reader = ConfigReader(raw, model_type, strict, found.keys)
    config = found.build(reader)
    reader.finish()
    return check(replace(config, raw=dict(raw)))
