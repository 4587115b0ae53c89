"""The config.json that a GGUF file of ours carries, and whether two configurations describe the same computation.

The metadata of a GGUF file decides what other programs compute. The config.json that the model came with travels beside
it as text: it is believed only where it says the same.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from math import isclose
from typing import Any

import numpy as np

from plait.errors import PlaitError
from plait.model.config import ModelConfig, RotarySpec
from plait.model.families import parse_config
from plait.model.rope import rotary_table
from plait.ops.spec import RotaryTable

log = logging.getLogger("plait.load")

CONFIG_KEY = "plait.config"
GENERATION_KEY = "plait.generation_config"
DTYPES_KEY = "plait.dtypes"

# What does not change a logit, or is told apart by other files (end tokens); tables are compared by their numbers.
_IGNORED = frozenset(
    [
        "model_type",
        "next_token_layers",
        "raw",
        "rotary",
        "eos_token_ids",
        "bos_token_id",
        "pad_token_id",
        "attention_dropout",
        "embedding_dropout",
        "hidden_dropout",
        "fp16_overflows",
    ]
)


def first_difference(a: ModelConfig, b: ModelConfig) -> str | None:
    """Where two configurations compute different things: "layers[0].attention.window is 24, not 0"; None: nowhere.

    Numbers that a file stores in fp32 may differ by that rounding.
    """
    for field in fields(a):
        if field.name not in _IGNORED:
            found = _difference(getattr(a, field.name), getattr(b, field.name), field.name)
            if found:
                return found
    if len(a.rotary) != len(b.rotary):
        return f"rotary tables: {len(a.rotary)}, not {len(b.rotary)}"
    for index, (one, other) in enumerate(zip(a.rotary, b.rotary, strict=True)):
        if not _same_table(one, other):
            return f"rotary[{index}] is {_short(one)}, not {_short(other)}"
    return None


def _difference(a: Any, b: Any, where: str) -> str | None:
    if type(a) is not type(b) and not (isinstance(a, int | float) and isinstance(b, int | float)):
        return f"{where} is {a!r:.80}, not {b!r:.80}"
    if is_dataclass(a):
        for field in fields(a):
            found = _difference(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
            if found:
                return found
        return None
    if isinstance(a, tuple):
        if len(a) != len(b):
            return f"{where}: {len(a)}, not {len(b)}"
        items = (_difference(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((found for found in items if found), None)
    same = isclose(a, b, rel_tol=1e-6) if isinstance(a, float) or isinstance(b, float) else a == b
    return None if same else f"{where} is {a!r:.80}, not {b!r:.80}"


def _same_table(a: RotarySpec, b: RotarySpec) -> bool:
    one, other = _one_set(rotary_table(a)), _one_set(rotary_table(b))
    return (
        a.width == b.width
        and isclose(one.magnitude, other.magnitude, rel_tol=1e-5)
        and _near(one.inv_freq, other.inv_freq)
        and _near(one.long_inv_freq, other.long_inv_freq)
        and one.original == other.original
    )


def _one_set(table: RotaryTable) -> RotaryTable:
    """A table whose two sets are the same has one."""
    return replace(table, long_inv_freq=(), original=0) if table.long_inv_freq == table.inv_freq else table


def _near(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return len(a) == len(b) and bool(np.allclose(a, b, rtol=1e-5, atol=0))


def _short(spec: RotarySpec) -> str:
    return f"{spec.rope_type} (theta {spec.theta:g})"


def original_config(metadata: Mapping[str, Any], derived: ModelConfig, strict: bool = False) -> ModelConfig | None:
    """The configuration of the config.json that travels in a GGUF file; None where there is none, or where it is not to
    be believed.

    derived: what the rest of the file says. A text that says something else is left unused, with a warning.
    """
    text = metadata.get(CONFIG_KEY)
    if text is None:
        return None
    try:
        raw = json.loads(text) if isinstance(text, str) else None
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        config = parse_config(raw, strict)
        difference = first_difference(config, derived)
        if difference is None:
            return config
        problem = f"by it, {difference} as in the rest of the file"
    except (PlaitError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        problem = str(error)
    log.warning("%s of the GGUF file is left unused: %.300s", CONFIG_KEY, problem)
    return None
