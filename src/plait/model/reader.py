"""Reads a config.json dictionary key by key, and afterwards accounts for every key that nobody read.

A key is obeyed, known to be harmless, or refused: a family function asks for the keys it implements, the rest is held
against the table of keys that the family's own class knows (known_keys.json).
"""

from __future__ import annotations

import difflib
import json
import logging
import sys
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import inf
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
        # Of a mixture's losses in training, which are asked for there and not here.
        "output_router_logits",
        "router_aux_loss_coef",
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
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset(["factor", "original_max_position_embeddings", "attention_factor", "short_mscale", "long_mscale"]),
    ),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "ntk_alpha": (frozenset({"alpha"}), frozenset()),
}
MAX_LAYERS = 10_000
_MAX_INTEGER = 2**63 - 1
_ORIGINAL = "original_max_position_embeddings"


@cache
def known_keys() -> dict[str, dict[str, Any]]:
    """model_type -> {key: default} for the classes that the table was generated from."""
    text = files("plait.model").joinpath("known_keys.json").read_text()
    return json.loads(text)["model_types"]


class ConfigReader:
    """One configuration being read. Call it with a key for the value, or the class's default where the key is
    absent.

    own_keys: of a family without a class elsewhere, its keys and their defaults; there are no others then.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        model_type: str,
        strict: bool = False,
        own_keys: Mapping[str, Any] | None = None,
    ) -> None:
        self.raw = raw
        self.model_type = model_type
        self.strict = strict
        self._is_own = own_keys is not None
        self._defaults: Mapping[str, Any] = known_keys()[model_type] if own_keys is None else own_keys
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
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MAX_INTEGER:
            raise ConfigError(f"{key}={_short(value)} in config.json must be a whole number of at most 64 bits")
        return value

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        """The number of layers, checked before anything is built for every one of them."""
        value = self.integer(key)
        if not 1 <= value <= MAX_LAYERS:
            raise ConfigError(f"{key}={value} must be at least 1 and at most {MAX_LAYERS}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """The key's own whole number, `default` where it is absent or null; the class's default is not consulted."""
        self._seen.add(key)
        return default if self.raw.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None, low: float = -inf, below: float = inf) -> float:
        """A finite number in [low, below); `default` (else the class's) where the key is absent or null."""
        value = self(key)
        if value is None:
            value = default
        if not _is_number(value):
            raise ConfigError(f"{key}={_short(value)} in config.json must be a finite number")
        if not low <= value < below:
            limits = ("" if low == -inf else f" of at least {low:g}") + ("" if below == inf else f" below {below:g}")
            raise ConfigError(f"{key}={value!r} must be a number{limits}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; `default` (else the class's) where the key is absent or null."""
        value = self(key)
        return _positive(key, default if value is None else value)

    def dropout(self, key: str) -> float:
        """A probability in [0, 1); absent or null is 0."""
        return self.number(key, 0.0, low=0.0, below=1.0)

    def flag(self, key: str) -> bool:
        """True or false; null counts as the class's default."""
        value = self(key)
        if value is None:
            value = self._defaults.get(key) or False
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={value!r} in config.json must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; null is none."""
        value = self(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_token_id(i) for i in ids):
            raise ConfigError(f"{key}={value!r} in config.json must be a token id, a list of them, or null")
        return tuple(ids)

    def token_id(self, key: str) -> int | None:
        """One token id; null is none."""
        value = self(key)
        if value is not None and not _is_token_id(value):
            raise ConfigError(f"{key}={value!r} in config.json must be a token id or null")
        return value

    def layer_types(self, num_layers: int) -> list[str] | None:
        """`layer_types`, checked for its length and for the two kinds that exist here."""
        types = self.given("layer_types")
        if types is None:
            return None
        if not isinstance(types, list):
            raise ConfigError(f"layer_types={types!r} in config.json must be a list")
        if len(types) != num_layers:
            raise ConfigError(f"layer_types has {len(types)} entries for num_hidden_layers={num_layers}")
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise ConfigError(f"layer_types has {unknown[0]!r}; supported are full_attention and sliding_attention")
        return list(types)

    def rope_block(self) -> dict[str, Any]:
        """`rope_parameters` (transformers 5) or `rope_scaling` (transformers 4), whichever is given; a copy."""
        old, new = self.mapping("rope_scaling"), self.mapping("rope_parameters")
        if old and new and old != new:
            log.warning(
                "config.json has both rope_scaling and rope_parameters; rope_scaling is used, as transformers does"
            )
        return dict(old or new)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object; an empty one where the key is absent or null."""
        value = self.given(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r} in config.json must be an object")
        return value

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
        kind = next((name for name in (new, old) if name is not None), "default")
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
        if kind == "yarn" and theta <= 1:
            raise ConfigError(f"rope_theta={theta!r} must be above 1 for rope_type='yarn'")
        needed, optional = ROPE_KEYS[kind]
        for key in needed - block.keys():
            raise ConfigError(f"rope_type={kind!r} needs the key {key!r}")
        for key in sorted(block.keys() - needed - optional):
            value = block.pop(key)
            if isinstance(value, Mapping):
                raise ConfigError(f"rope_parameters.{key}: a {self.model_type} has one rotary table for all layers")
            if value is not None:
                self._unread(f"rope_parameters.{key}", value, known=False)
        if kind in ("llama3", "yarn", "longrope"):
            # A value at the top level of config.json outranks the block's, and the context itself is the fallback.
            own = block.get(_ORIGINAL)
            block[_ORIGINAL] = self.given(_ORIGINAL, max_positions if own is None else own)
        for key, value in block.items():
            if key == "truncate":
                if not isinstance(value, bool | None):
                    raise ConfigError(f"rope_parameters.truncate={value!r} must be true or false")
            elif key in ("short_factor", "long_factor"):
                block[key] = _divisors(f"rope_parameters.{key}", value, int(head_width * partial) // 2)
            elif key in needed or value is not None:
                _positive(f"rope_parameters.{key}", value, zero=key.startswith("mscale"))
        width = head_width if kind == "proportional" else int(head_width * partial)
        if kind in ("dynamic", "ntk_alpha") and width <= 2:
            raise ConfigError(f"rope_type={kind!r} needs more than 2 rotating features, here {width} are")
        if kind == "longrope" and not block[_ORIGINAL] > 1:
            raise ConfigError(f"{_ORIGINAL}={block[_ORIGINAL]!r} must be above 1 for rope_type='longrope'")
        if kind == "proportional":
            block["partial_rotary_factor"] = partial
        scaling = {k: v for k, v in block.items() if v is not None or k == "factor"}
        return RotarySpec(kind, theta, width, head_width, max_positions, scaling)

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
        if self._is_own:  # nobody else writes such files, so this is a slip
            near = difflib.get_close_matches(key, self._defaults, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(self._defaults))}"
            raise ConfigError(f"{message}; {hint}")
        if self.strict:
            raise ConfigError(f"{message} (--strict)")
        log.warning("%s; ignored", message)


def _is_number(value: Any) -> bool:
    """A number that a float can hold and that is finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # also False for NaN


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INTEGER


def _positive(key: str, value: Any, zero: bool = False) -> float:
    """A finite number above 0 (or at least 0); ConfigError naming the key otherwise."""
    if not _is_number(value) or not (value > 0 or (zero and value == 0)):
        raise ConfigError(f"{key}={_short(value)} must be a positive number")
    return float(value)


def _divisors(key: str, value: Any, pairs: int) -> tuple[float, ...]:
    """One positive number for each rotating pair."""
    if not isinstance(value, list | tuple) or len(value) != pairs:
        count = f"{len(value)} numbers" if isinstance(value, list | tuple) else _short(value)
        raise ConfigError(f"{key} is {count}; it must be a list of {pairs} numbers, one per rotating pair")
    return tuple(_positive(key, number) for number in value)


def _short(value: Any) -> str:
    """The value for an error line; an integer of thousands of digits is not written out."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
