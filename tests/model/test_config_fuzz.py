"""Whatever stands in a config.json, the outcome is a model that could be built or an error that names what is wrong."""

from __future__ import annotations

import cmath
import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.model.config import ModelConfig
from plait.model.families import families, parse_config
from plait.model.reader import HARMLESS, MAX_LAYERS, ROPE_KEYS, known_keys
from tests.configs import CONFIGS

pytestmark = pytest.mark.slow

BAD_VALUES = [None, [], {}, "x", -1, 0, 1e400, True, [1], float("nan"), 0.5, 10**400, "full_attention", [[], []]]
ROPE_NAMES = sorted(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor"}.union(*(a | b for a, b in ROPE_KEYS.values()))
)
ROPE_BLOCKS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]},
}
OTHER_KEYS = {"model_type", "text_config", "quantization_config", "rope_scaling", "rope_divisors", "layer_types"}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "plait.config")


def numbers(value: Any) -> Iterator[float | complex]:
    """Every number of a configuration, but for the dictionary that it came from."""
    if is_dataclass(value):
        for f in fields(value):
            if f.name != "raw":
                yield from numbers(getattr(value, f.name))
    elif isinstance(value, dict):
        yield from numbers(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float | complex):
        yield value


def keys_of(family: str) -> set[str]:
    own = families()[family].keys
    return set(known_keys()[family] if own is None else own)


def settle(raw: dict[str, Any]) -> None:
    try:
        config = parse_config(raw)
    except ConfigError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert isinstance(config, ModelConfig)
    for number in numbers(config):
        assert not isinstance(number, complex) and cmath.isfinite(number), (number, config)


@pytest.mark.parametrize("family", sorted(families()))
def test_any_value_of_any_key_gives_a_configuration_or_a_config_error(family: str) -> None:
    for key in sorted(keys_of(family) | CONFIGS[family].keys() | HARMLESS | OTHER_KEYS):
        for value in BAD_VALUES:
            settle({**CONFIGS[family], key: value})


@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize("kind", sorted(ROPE_BLOCKS))
def test_so_does_any_value_of_any_rope_key(family: str, kind: str) -> None:
    for key in ROPE_NAMES:
        for value in BAD_VALUES:
            block = {"rope_type": kind, **ROPE_BLOCKS[kind], key: value}
            settle({**CONFIGS[family], "rope_parameters": block})
            settle({**CONFIGS[family], "rope_parameters": {"full_attention": block, "sliding_attention": value}})


NAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layer list": ("qwen2", {"layer_types": 5}, r"layer_types=5 .*must be a list"),
    "lists in the layer list": ("qwen2", {"layer_types": [[], [], []]}, r"layer_types has \[\]"),
    "activation in a list": ("llama", {"hidden_act": [1]}, r"hidden_act=\[1\]"),
    "family in a list": ("llama", {"model_type": [1]}, r"model_type=\[1\]"),
    "scale of 0": ("gemma3_text", {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar=0 must be a positive"),
    "negative scale": ("gemma3_text", {"query_pre_attn_scalar": -1}, r"query_pre_attn_scalar=-1 must be a positive"),
    "yarn with one frequency": (
        "llama",
        {"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        r"rope_theta=1.0 must be above 1 for rope_type='yarn'",
    ),
    "bos as text": ("llama", {"bos_token_id": "x"}, r"bos_token_id='x'"),
    "negative eos": ("llama", {"eos_token_id": [1, -2]}, r"eos_token_id=\[1, -2\]"),
    "all dropped": ("gpt_neox", {"hidden_dropout": 1.0}, r"hidden_dropout=1.0 .*at least 0 below 1"),
    "negative dropout": ("llama", {"attention_dropout": -0.1}, r"attention_dropout=-0.1 .*at least 0 below 1"),
    "negative soft cap": ("gemma3_text", {"final_logit_softcapping": -3}, r"final_logit_softcapping=-3"),
    "no object": ("llama", {"rope_scaling": [1]}, r"rope_scaling=\[1\] .*object"),
    "no object for a kind of layer": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": "x"}},
        r"rope_parameters.full_attention='x' .*object",
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_the_error_names_key_and_value(case: str) -> None:
    family, changes, message = NAMED[case]
    with pytest.raises(ConfigError, match=message):
        parse_config({**CONFIGS[family], **changes})


@pytest.mark.parametrize("family", sorted(families()))
def test_a_number_of_layers_that_no_model_has_is_refused_before_anything_is_built_for_each(family: str) -> None:
    """A tuple of 10^15 layers would not fit in any memory."""
    key = next(key for key in ("n_layer", "n_layers", "num_hidden_layers") if key in CONFIGS[family])
    for number in (MAX_LAYERS + 1, 10**15):
        with pytest.raises(ConfigError, match=f"{key}={number} must be at least 1 and at most 10000"):
            parse_config({**CONFIGS[family], key: number})


def test_the_table_of_keys_has_every_family_that_has_a_class_and_no_other() -> None:
    assert known_keys().keys() == {name for name, family in families().items() if not family.is_own}


def test_an_end_token_beyond_the_vocabulary_warns_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "plait.config")
    assert parse_config({**CONFIGS["llama"], "eos_token_id": [1, 96]}).eos_token_ids == (1, 96)
    assert "eos_token_id=96 is beyond vocab_size=96" in caplog.text


def test_a_padding_token_of_minus_one_is_none() -> None:
    assert parse_config({**CONFIGS["llama"], "pad_token_id": -1}).pad_token_id is None


def test_divisors_are_nothing_that_a_config_json_can_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "plait.config")
    config = parse_config({**CONFIGS["llama"], "rope_divisors": [1.0, 2.0, 4.0]})
    assert config.rotary[0].divisors is None
    assert "rope_divisors=[1.0, 2.0, 4.0] is no key of llama" in caplog.text
