"""Regular expressions that a checkpoint's files bring: those whose matching might not end in time are refused."""

from __future__ import annotations

import re
from typing import Any

# An expression is matched with every module's name: one that can go back and forth without end is refused.
_MAX_CHARACTERS = 2000
_MAX_REPEATS = 4
_MANY = 16
_NEVER = 1000


def compile_pattern(text: str, before: str = "", after: str = "") -> re.Pattern[str]:
    """The expression `text`, compiled with `before` and `after` around it. ValueError, the reason, for one that is none
    or might not end."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"has an expression of {len(text)} characters, at most {_MAX_CHARACTERS} are read")
    try:
        parsed = re._parser.parse(text)  # type: ignore[attr-defined]
        compiled = re.compile(f"{before}{text}{after}")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if _degree(parsed) > _MAX_REPEATS:
        raise ValueError("repeats too often, or what can be matched in several ways: list the modules instead")
    return compiled


def _degree(parsed: Any, repeated: bool = False) -> int:
    """How often a parsed expression repeats something without a small bound, one after the other: matching a name of n
    characters takes at most n to that power. _NEVER where what is repeated can itself be matched in several ways."""
    total = 0
    for kind, argument in parsed:
        name = str(kind)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = argument
            if repeated and least != most:
                return _NEVER
            total += (most > _MANY) + _degree(inner, repeated or most > 1)
        elif name == "BRANCH":
            if repeated:
                return _NEVER
            total += max(_degree(branch) for branch in argument[1])
        else:  # what a group or an assertion holds
            parts = argument if isinstance(argument, tuple) else (argument,)
            total += sum(_degree(part, repeated) for part in parts if hasattr(part, "getwidth"))
    return total
