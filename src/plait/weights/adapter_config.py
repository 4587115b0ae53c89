"""adapter_config.json of a LoRA adapter in `peft`'s format: which modules it changes, by what rank and scale. No torch.

What would change the result and is not carried out is refused by name; a key that this version does not know is too,
unless it is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.jsonfile import read_json
from plait.patterns import compile_pattern

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 1 << 16

# Of no consequence for what a finished adapter computes.
_IGNORED = frozenset(
    (
        *("base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "auto_mapping", "peft_version"),
        *("fan_in_fan_out", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("qalora_group_size", "runtime_config", "ensure_weight_tying", "velora_config"),
    )
)
# What each of these keys brings, where it is set.
_REFUSED = {
    "use_dora": "DoRA (weights apart in magnitude and direction)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "a bias beside the low-rank matrices",
    "modules_to_save": "whole modules beside the low-rank matrices",
    "trainable_token_indices": "trained embeddings",
    "target_parameters": "parameters that belong to no linear module, such as the stacks of experts",
    "layer_replication": "layers that are there several times",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron's parallel layers",
}
# The beginnings of these change the base model's own weights, which the adapter then goes with.
_HARMLESS_BEGINNINGS = ("gaussian", "eva", "orthogonal")
_READ = frozenset(
    (
        *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "bias"),
        *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights"),
    )
)


@dataclass(frozen=True)
class LoraConfig:
    """What an adapter_config.json says. Modules are named as in the base model ("model.layers.0.self_attn.q_proj").

    targets: names or their endings, or a regular expression; None for all linear modules. layers: None for all.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    targets: tuple[str, ...] | re.Pattern[str] | None = None
    excluded: tuple[str, ...] | re.Pattern[str] = ()
    layers: frozenset[int] | None = None
    layer_patterns: tuple[re.Pattern[str], ...] = ()
    ranks: tuple[tuple[re.Pattern[str], int], ...] = ()
    alphas: tuple[tuple[re.Pattern[str], float], ...] = ()
    path: Path = field(default_factory=Path)

    def changes(self, module: str) -> bool:
        """Whether the adapter has matrices for a linear module."""
        if _named(module, self.excluded):
            return False
        if self.targets is None:
            return True
        if not _named(module, self.targets):
            return False
        return self.layers is None or self._layer_of(module) in self.layers

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) (rank-stabilised, Kalajdzievski 2023)."""
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (sqrt(rank) if self.use_rslora else rank)

    def _layer_of(self, module: str) -> int | None:
        found = next((m for pattern in self.layer_patterns if (m := pattern.match(module))), None)
        return None if found is None else int(found["idx"])


def read_lora_config(directory: Path) -> LoraConfig:
    """The adapter_config.json of a directory. Raises ConfigError, naming the file and the key, for what is no LoRA
    adapter or cannot be carried out."""
    path = directory / CONFIG_NAME
    return parse_lora_config(read_json(path), path)


def parse_lora_config(raw: Mapping[str, Any], path: Path) -> LoraConfig:
    """See `read_lora_config`; path: for the errors."""
    read = _Reader(raw, path)
    read.refuse_what_is_not_carried_out()
    named, excluded = read.names("target_modules", required=True), read.names("exclude_modules")
    targets: tuple[str, ...] | re.Pattern[str] | None
    if isinstance(named, str):
        targets = None if named.lower() == "all-linear" else read.pattern("target_modules", named)
    else:
        targets = named
    layers, patterns = read.layers()
    if layers is not None and not isinstance(targets, tuple):
        raise read.error("layers_to_transform", "goes with a list of target_modules only")
    return LoraConfig(
        rank=read.rank("r", raw.get("r", 8)),
        alpha=read.number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=read.flag("use_rslora"),
        targets=targets,
        excluded=read.pattern("exclude_modules", excluded) if isinstance(excluded, str) else excluded,
        layers=layers,
        layer_patterns=patterns,
        ranks=tuple((p, read.rank("rank_pattern", v)) for p, v in read.by_pattern("rank_pattern")),
        alphas=tuple((p, read.number("alpha_pattern", v)) for p, v in read.by_pattern("alpha_pattern")),
        path=path,
    )


class _Reader:
    """Values of the file, checked."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw, self.path = raw, path

    def error(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key}={self.raw.get(key)!r:.100} {why}")

    def refuse_what_is_not_carried_out(self) -> None:
        raw = self.raw
        kind = raw.get("peft_type")
        if kind != "LORA":
            why = "is no LoRA adapter" if isinstance(kind, str) else "does not say that this is a LoRA adapter"
            raise self.error("peft_type", f"{why}; only adapters of peft_type LORA can be used")
        if raw.get("task_type") not in (None, "CAUSAL_LM"):
            raise self.error("task_type", "is another task than causal language modelling (CAUSAL_LM)")
        for key, what in _REFUSED.items():
            if not _empty(raw.get(key)):
                raise self.error(key, f"asks for {what}, which is not supported; merge the adapter with peft first")
        if raw.get("bias", "none") != "none":
            raise self.error("bias", "has biases trained, which is not supported; merge the adapter with peft first")
        begun = raw.get("init_lora_weights", True)
        if not isinstance(begun, bool) and begun not in (None, *_HARMLESS_BEGINNINGS):
            raise self.error(
                "init_lora_weights",
                "began with changed base weights: convert the adapter to plain LoRA with peft"
                " (path_initial_model_for_weight_conversion) first",
            )
        known = _IGNORED | _REFUSED.keys() | _READ
        for key, value in raw.items():
            if key not in known and not _empty(value):
                raise ConfigError(f"{self.path}: {key!r:.60}={value!r:.100} is not known: it may change the result")

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return bool(value)

    def rank(self, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise self.error(key, f"must be a rank, 1 to {MAX_RANK}")
        return value

    def number(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or abs(value) > 1e9 or not isfinite(value):
            raise self.error(key, "must be a finite number")
        return float(value)

    def names(self, key: str, required: bool = False) -> tuple[str, ...] | str:
        """A list of names, or one text."""
        value = self.raw.get(key)
        if value is None and not required:
            return ()
        if isinstance(value, str) and value:
            return value
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise self.error(key, "must be a list of module names, or a regular expression")
        if required and not value:
            raise self.error(key, "names no module")
        return tuple(value)

    def layers(self) -> tuple[frozenset[int] | None, tuple[re.Pattern[str], ...]]:
        value = self.raw.get("layers_to_transform")
        if value is None or value == []:
            return None, ()
        indices = [value] if type(value) is int else value
        if not isinstance(indices, list) or not all(type(i) is int and i >= 0 for i in indices):
            raise self.error("layers_to_transform", "must be a layer's index or a list of them")
        found = self.names("layers_pattern") or (r"[^.]*",)
        names = (found,) if isinstance(found, str) else found
        # The first number behind the layers' name: a later one may be an expert's.
        begin = r".*?\." if names == (r"[^.]*",) else r"(?:^|.*?\.)"
        compiled = tuple(self.pattern("layers_pattern", name, begin, r"\.(?P<idx>\d+)\.") for name in names)
        return frozenset(indices), compiled

    def by_pattern(self, key: str) -> Iterator[tuple[re.Pattern[str], Any]]:
        """The patterns of a map from names (or expressions that end them) to values, in their order."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "must be a map from module names to numbers")
        for text, number in (value or {}).items():
            yield self.pattern(key, text, r"(?:.*\.)?(?:", r")$"), number

    def pattern(self, key: str, text: str, before: str = "", after: str = "") -> re.Pattern[str]:
        """A compiled expression. ConfigError for one that is none, or whose matching might not end in time."""
        try:
            return compile_pattern(text, before, after)
        except ValueError as error:
            raise self.error(key, str(error)) from None


def _named(module: str, names: tuple[str, ...] | re.Pattern[str]) -> bool:
    """Whether an expression matches the whole name, or it is one of the names or ends with one of them."""
    if isinstance(names, tuple):
        return any(module == name or module.endswith(f".{name}") for name in names)
    return names.fullmatch(module) is not None


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})
