"""Frozen dataclasses from plain mappings: every key known, every value of its type, every error with the full path."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from plait.errors import ConfigError

T = TypeVar("T")


def build_tree(kind: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """An instance of the dataclass `kind`, nested ones included.

    Fields may be bool, int, float, str, Literal, dict, dataclasses, lists, tuples and unions of these. A whole float
    is an int, an int is a float. Raises ConfigError naming the key by its path; for an unknown one with the nearest
    that is known.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise ConfigError(_unknown(f"{path}{key}", key, path, known, kind))
    hints = _hints(kind)  # type: ignore[arg-type]
    values = {key: _value(hints[key], value, f"{path}{key}") for key, value in data.items()}
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{path}{name} is missing: the recipe must say it")
    return kind(**values)


def to_plain(value: Any) -> Any:
    """Dataclasses as dictionaries and tuples as lists, all the way down: what YAML and JSON can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, old value, new value) of every leaf that differs between two plain trees."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield path, old, new


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _unknown(full: str, key: str, path: str, known: Mapping[str, Any], kind: type) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.55)
    if near:
        return f"{full}: there is no such key; did you mean {path}{near[0]}?"
    elsewhere = [where for where in _all_paths(kind, path) if where.rpartition(".")[2] == key]
    if elsewhere:
        return f"{full}: there is no such key here; did you mean {elsewhere[0]}?"
    return f"{full}: there is no such key; known here: {', '.join(known)}"


def _all_paths(kind: type, path: str) -> Iterator[str]:
    for name, hint in _hints(kind).items():
        yield f"{path}{name}"
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and is_dataclass(part):
                yield from _all_paths(part, f"{path}{name}.")


def _value(hint: Any, value: Any, path: str) -> Any:
    found = _convert(hint, value, path)
    if found is _WRONG:
        shown = repr(value)
        raise ConfigError(f"{path}={shown if len(shown) < 60 else shown[:57] + '...'} must be {_words(hint)}")
    return found


_WRONG = object()


def _convert(hint: Any, value: Any, path: str) -> Any:
    """The value as the type wants it, or _WRONG."""
    origin, options = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        # A mapping goes to the dataclass among the options, whose own error is the useful one.
        for option in options:
            if (converted := _convert(option, value, path)) is not _WRONG:
                return converted
        return _WRONG
    if origin is Literal:
        return value if any(value is o or (type(value) is type(o) and value == o) for o in options) else _WRONG
    if isinstance(hint, type) and is_dataclass(hint):
        return build_tree(hint, value, f"{path}.") if isinstance(value, Mapping) else _WRONG
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return _WRONG
        item = options[0] if options else Any
        return origin(_value(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin in (dict, Mapping) or hint is dict or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(value, Mapping):
            return _WRONG
        item = options[1] if options else Any
        return {key: _value(item, v, f"{path}.{key}") for key, v in value.items()}
    return _scalar(hint, value)


def _scalar(hint: Any, value: Any) -> Any:
    if hint is NoneType:
        return None if value is None else _WRONG
    if isinstance(value, bool):
        return value if hint is bool else _WRONG
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and isinstance(value, int):
        return float(value)
    return value if isinstance(hint, type) and isinstance(value, hint) else _WRONG


def _words(hint: Any) -> str:
    """A type in words."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(option) for option in options)
    if origin is Literal:
        return f"one of {', '.join(map(str, options))}"
    if isinstance(hint, type) and is_dataclass(hint):
        return "a mapping of keys"
    if origin in (list, tuple):
        return f"a list, each {_words(options[0])}" if options else "a list"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
    return names.get(hint, "a mapping of keys")
