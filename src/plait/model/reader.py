"""Reads a config.json dictionary key by key, and afterwards accounts for every key that nobody read.

A key is obeyed, known to be harmless, or refused: a family function asks for the keys it implements, the rest is held
against the table of keys that the family's own class knows (known_keys.json).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from plait.errors import ConfigError
from plait.model.config import RotarySpec

log = logging.getLogger("plait.config")

# Keys that cannot change what the forward computes, for any family.
HARMLESS = frozenset(
    [
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "initializer_range",
        "use_cache",
        "auto_map",
        "name_or_path",
        "_name_or_path",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "classifier_dropout",
        "pretraining_tp",
        "is_decoder",
        "_attn_implementation",
        "attn_implementation",
        "cache_implementation",
        "unsloth_version",
        "unsloth_fixed",
        "sep_token_id",
        "decoder_start_token_id",
        "torchscript",
    ]
)

# Per rope_type: keys that the type needs, and keys that it may have beside rope_type, rope_theta and
# partial_rotary_factor.
ROPE_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
        frozenset({"original_max_position_embeddings"}),
    ),
    "yarn": (
        frozenset(),
        frozenset(
            [
                "factor",
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ]
        ),
    ),
    "proportional": (frozenset(), frozenset({"factor"})),
}
ROPE_LATER = ("longrope", "su", "dynamic")
_ORIGINAL = "original_max_position_embeddings"


@cache
def known_keys() -> dict[str, dict[str, Any]]:
    """model_type -> {key: default} for the classes that the table was generated from."""
    text = files("plait.model").joinpath("known_keys.json").read_text()
    return json.loads(text)["model_types"]


class ConfigReader:
    """One configuration being read. Call it with a key for the value, or the class's default where the key is
    absent."""

    def __init__(self, raw: Mapping[str, Any], model_type: str, strict: bool = False) -> None:
        self.raw = raw
        self.model_type = model_type
        self.strict = strict
        self._defaults = known_keys()[model_type]
        self._seen: set[str] = set()

    def __call__(self, key: str) -> Any:
        self._seen.add(key)
        return self.raw[key] if key in self.raw else self._defaults.get(key)

    def given(self, key: str, default: Any = None) -> Any:
        """The key's own value, `default` where it is absent or null; the class's default is not consulted."""
        self._seen.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; `default` (else the class's) where the key is absent or null."""
        value = self(key)
        if value is None:
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key}={value!r} in config.json must be a whole number")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """The key's own whole number, `default` where it is absent or null; the class's default is not consulted."""
        self._seen.add(key)
        return default if self.raw.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; `default` (else the class's) where the key is absent or null."""
        value = self(key)
        if value is None:
            value = default
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value != value
            or abs(value) == float("inf")
        ):
            raise ConfigError(f"{key}={value!r} in config.json must be a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; null counts as the class's default."""
        value = self(key)
        if value is None:
            value = self._defaults.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={value!r} in config.json must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; null is none."""
        value = self(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"{key}={value!r} in config.json must be a token id, a list of them, or null")
        return tuple(ids)

    def layer_types(self, num_layers: int) -> list[str] | None:
        """`layer_types`, checked for its length and for the two kinds that exist here."""
        types = self.given("layer_types")
        if types is None:
            return None
        if len(types) != num_layers:
            raise ConfigError(f"layer_types has {len(types)} entries for num_hidden_layers={num_layers}")
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ConfigError(f"layer_types has {unknown[0]!r}; supported are full_attention and sliding_attention")
        return list(types)

    def rope_block(self) -> dict[str, Any]:
        """`rope_parameters` (transformers 5) or `rope_scaling` (transformers 4), whichever is given; a copy."""
        old, new = self.given("rope_scaling"), self.given("rope_parameters")
        if old and new and old != new:
            log.warning(
                "config.json has both rope_scaling and rope_parameters; rope_scaling is used, as transformers does"
            )
        block = old or new or {}
        if not isinstance(block, Mapping):
            raise ConfigError(f"rope_parameters={block!r} in config.json must be an object")
        return dict(block)

    def rotary(
        self,
        head_width: int,
        block: Mapping[str, Any],
        theta: float,
        max_positions: int,
        partial: float | None = None,
    ) -> RotarySpec:
        """A rotary table from one flat block of rope parameters.

        theta, partial: what applies where the block names none; partial None is a family that rotates whole heads.
        Both spellings of the type are read; where they disagree `rope_type` wins, with a warning.
        """
        block = dict(block)
        old, new = block.pop("type", None), block.pop("rope_type", None)
        if old and new and old != new:
            log.warning("rope scaling names type=%r and rope_type=%r; rope_type is used", old, new)
        kind = new or old or "default"
        if kind in ROPE_LATER:
            raise ConfigError(f"rope_type={kind!r} is not supported yet (supported: {', '.join(ROPE_KEYS)})")
        if not isinstance(kind, str) or kind not in ROPE_KEYS:
            raise ConfigError(f"rope_type={kind!r} is unknown (supported: {', '.join(ROPE_KEYS)})")
        own_theta = block.pop("rope_theta", None)
        theta = _positive("rope_theta", theta if own_theta is None else own_theta)
        own_partial = block.pop("partial_rotary_factor", None)
        if partial is None:
            own_partial = self.given("partial_rotary_factor") if own_partial is None else own_partial
            if kind != "proportional" and own_partial not in (None, 1):
                raise ConfigError(f"partial_rotary_factor={own_partial!r}: a {self.model_type} rotates whole heads")
            partial = 1.0
        partial = _positive("partial_rotary_factor", partial if own_partial is None else own_partial)
        needed, optional = ROPE_KEYS[kind]
        for key in needed - block.keys():
            raise ConfigError(f"rope_type={kind!r} needs the key {key!r}")
        for key in sorted(block.keys() - needed - optional):
            value = block.pop(key)
            if value is not None:
                self._unread(f"rope_parameters.{key}", value, known=False)
        if kind in ("llama3", "yarn"):
            # A value at the top level of config.json outranks the block's, and the context itself is the fallback.
            block[_ORIGINAL] = self.given(_ORIGINAL) or block.get(_ORIGINAL) or max_positions
        for key, value in block.items():
            if key == "truncate":
                if not isinstance(value, bool | None):
                    raise ConfigError(f"rope_parameters.truncate={value!r} must be true or false")
            elif key in needed or value is not None:
                _positive(f"rope_parameters.{key}", value, zero=key.startswith("mscale"))
        width = head_width if kind == "proportional" else int(head_width * partial)
        if kind == "proportional":
            block["partial_rotary_factor"] = partial
        divisors = self.given("rope_divisors")
        scaling = {k: v for k, v in block.items() if v is not None or k == "factor"}
        return RotarySpec(kind, theta, width, head_width, max_positions, scaling, tuple(divisors) if divisors else None)

    def finish(self) -> None:
        """Account for every key that the family did not ask for (see the module's docstring)."""
        for key in sorted(self.raw.keys() - self._seen - HARMLESS):
            value = self.raw[key]
            if key in self._defaults:
                if value is not None and value != self._defaults[key]:
                    self._unread(key, value, known=True)
            elif value is not None:
                self._unread(key, value, known=False)

    def _unread(self, key: str, value: Any, known: bool) -> None:
        if known:
            raise ConfigError(
                f"{key}={value!r}: {self.model_type} knows this key and plait does not implement it with that value"
            )
        message = f"{key}={value!r} is no key of {self.model_type}"
        if self.strict:
            raise ConfigError(f"{message} (--strict)")
        log.warning("%s; ignored", message)


def _positive(key: str, value: Any, zero: bool = False) -> float:
    """A finite number above 0 (or at least 0); ConfigError naming the key otherwise."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value < float("inf")
    if not number or not (value > 0 or (zero and value == 0)):
        raise ConfigError(f"{key}={value!r} must be a positive number")
    return float(value)
