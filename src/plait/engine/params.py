"""What a caller may ask of one generation: vLLM's names, meanings and defaults, and llama.cpp's DRY and XTC.

Everything that can be judged without a model is judged here; token ids are compared with the
vocabulary, and counts with the engine's limits, when the request reaches the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from plait.errors import RequestError

# Below this temperature the distribution is a point on the largest logit: such requests decode greedily.
GREEDY_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
# Values of logit_bias with a meaning of their own: never this token, only such tokens.
BAN, FORCE = -100.0, 100.0
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_ID_LIST = 4096
MAX_BAD_WORDS = 1024
DEFAULT_DRY_BREAKERS = ("\n", ":", '"', "*")

_NOT_SUPPORTED = ("structured_outputs", "beam_width", "length_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. Raises RequestError naming the field.

    n: choices per prompt (1 .. 128); choice 0 equals the only choice of n = 1 with the same seed.
    temperature: 0 .. 100; 0, and anything below 1e-4, is greedy (ties to the lowest id), which ignores the filters.
    top_p: 0 .. 1; 0 keeps one token. top_k: keeps ties at the k-th place; 0 or -1 is off.
    min_p: 0 .. 1. typical_p: above 0, at most 1 (off).
    presence_penalty, frequency_penalty: -2 .. 2, over the output. repetition_penalty: 0.01 .. 100,
        over prompt and output.
    seed: any integer of 64 bits; None draws one per request.
    stop: a string or strings; matched on the text (not during the first min_tokens tokens).
    stop_token_ids: end the output, besides the model's end tokens. ignore_eos switches off only the latter.
    bad_words: strings that must not be completed; needs a tokenizer, which resolves them to bad_words_token_ids.
    allowed_token_ids: nothing else is sampled.
    logit_bias: id (int, or its decimal string) -> -100 .. 100, added to the logit; -100 bans the token, and
        where a token has 100 only such tokens are sampled.
    min_tokens: no end or stop token before so many output tokens. max_tokens: None fills the context; 0 only
        together with prompt_logprobs (scoring).
    logprobs, prompt_logprobs: how many alternatives to report beside the token itself, from the raw distribution
        (log-softmax of the model's logits); None reports nothing. The engine bounds them (20 by default).
    detokenize: False leaves the text empty (ids only).
    dry_*, xtc_*: llama.cpp's meanings. dry_multiplier 0 and xtc_probability 0 are off; dry_penalty_last_n -1 looks
        at the whole context, 0 is off. dry_sequence_breakers needs a tokenizer, which resolves it to
        dry_breaker_token_ids (head token first).
    structured_outputs, beam_width, length_penalty: not supported yet, an error when given.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: Any = None
    allowed_token_ids: Any = None
    logit_bias: Any = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Any = DEFAULT_DRY_BREAKERS
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    structured_outputs: Any = None
    beam_width: Any = None
    length_penalty: Any = None
    bad_words_token_ids: Any = None
    dry_breaker_token_ids: Any = None

    def __post_init__(self) -> None:
        for name in _NOT_SUPPORTED:
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not supported yet; leave it out", field=name)
        for name, low, high, open_low in _NUMBERS:
            self._set(name, _number(name, getattr(self, name), low, high, open_low))
        for name, lowest, highest in _INTEGERS:
            self._set(name, _integer(name, getattr(self, name), lowest, highest))
        for name, lowest, highest in _OPTIONAL_INTEGERS:
            value = getattr(self, name)
            self._set(name, None if value is None else _integer(name, value, lowest, highest))
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r:.40}", field=name)
        self._set("stop", _strings("stop", self.stop, MAX_STOPS))
        self._set("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        self._set("dry_sequence_breakers", _strings("dry_sequence_breakers", self.dry_sequence_breakers, MAX_STOPS))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids, MAX_ID_LIST))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids, 1 << 20)
            if not allowed:
                raise RequestError("allowed_token_ids is empty: give at least one id, or null", "allowed_token_ids")
            self._set("allowed_token_ids", allowed)
        self._set("logit_bias", _bias(self.logit_bias))
        for name in ("bad_words_token_ids", "dry_breaker_token_ids"):
            if getattr(self, name) is not None:
                self._set(name, _id_lists(name, getattr(self, name)))
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", field="min_tokens"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens 0 generates nothing: it needs prompt_logprobs (scoring)", "max_tokens")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need the text: leave detokenize true", field="stop")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True when the largest logit is taken and nothing is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def uses_penalties(self) -> bool:
        """True when token counts matter."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    @property
    def uses_dry(self) -> bool:
        """True when the DRY penalty is on."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of all fields: what a front end may pass on."""
        return frozenset(f.name for f in fields(cls))


# name, lowest, highest, whether the lowest itself is excluded
_NUMBERS = (
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("repetition_penalty", MIN_REPETITION_PENALTY, 100.0, False),
    ("temperature", 0.0, MAX_TEMPERATURE, False),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, False),
    ("typical_p", 0.0, 1.0, True),
    ("dry_multiplier", 0.0, 100.0, False),
    ("dry_base", 0.0, 100.0, False),
    ("xtc_probability", 0.0, 1.0, False),
    ("xtc_threshold", 0.0, 1.0, False),
)
_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("n", 1, MAX_CHOICES),
    ("top_k", -1, 1 << 31),
    ("min_tokens", 0, 1 << 31),
    ("dry_allowed_length", 0, 1 << 31),
    ("dry_penalty_last_n", -1, 1 << 31),
)
_OPTIONAL_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("seed", -(1 << 63), (1 << 64) - 1),
    ("max_tokens", 0, None),
    ("logprobs", 0, None),
    ("prompt_logprobs", 0, None),
)


def _range(low: float, high: float | None, open_low: bool = False) -> str:
    if high is None:
        return f"at least {low}"
    return f"above {low:g} and at most {high:g}" if open_low else f"between {low} and {high}"


def _number(name: str, value: Any, low: float, high: float, open_low: bool) -> float:
    wanted = f"{name} must be a number {_range(low, high, open_low)}, got {value!r:.40}"
    try:
        if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
            raise TypeError
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(wanted, field=name) from None
    if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        raise RequestError(wanted, field=name)
    return value


def _integer(name: str, value: Any, low: int, high: int | None) -> int:
    wanted = f"{name} must be an integer {_range(low, high)}, got {value!r:.40}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(wanted, field=name)
    value = value.__index__()
    if value < low or (high is not None and value > high):
        raise RequestError(wanted, field=name)
    return value


def _strings(name: str, value: Any, limit: int) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise RequestError(f"{name} must be a string or a list of strings, got {value!r:.80}", field=name)
    if len(strings) > limit:
        raise RequestError(f"{name} has {len(strings)} strings, at most {limit} are allowed", field=name)
    if "" in strings:
        raise RequestError(f"{name} holds an empty string, which would match everywhere; leave it out", field=name)
    if any(len(s) > MAX_STOP_CHARACTERS for s in strings):
        raise RequestError(f"{name} holds a string of more than {MAX_STOP_CHARACTERS} characters", field=name)
    try:
        "".join(strings).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds half of a surrogate pair, which is no character", field=name) from None
    return tuple(strings)


def _ids(name: str, value: Any, limit: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name} must be a list of token ids, got {value!r:.80}", field=name)
    if hasattr(value, "__len__") and len(value) > limit:
        raise RequestError(f"{name} has {len(value)} ids, at most {limit} are allowed", field=name)
    return tuple(_integer(name, item, 0, (1 << 31) - 1) for item in value)


def _id_lists(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name} must be a list of lists of token ids, got {value!r:.80}", field=name)
    lists = tuple(_ids(name, part, MAX_ID_LIST) for part in value)
    if () in lists:
        raise RequestError(f"{name} holds an empty list; leave it out", field=name)
    return lists


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r:.80}", field="logit_bias")
    if len(value) > MAX_ID_LIST:
        raise RequestError(f"logit_bias has {len(value)} ids, at most {MAX_ID_LIST} are allowed", field="logit_bias")
    result = {}
    for key, bias in value.items():
        number = key
        if isinstance(key, str):
            if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 12):
                raise RequestError(f"logit_bias key {key!r:.40} is not a token id", field="logit_bias")
            number = int(key)
        number = _integer("logit_bias", number, 0, (1 << 31) - 1)
        result[number] = _number("logit_bias", bias, BAN, FORCE, False)
    return result
