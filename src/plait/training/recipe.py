"""Reads YAML recipes: one recipe may extend another, words on the command line change single values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from plait.errors import ConfigError, UsageError
from plait.jsonfile import read_text

BASE = "base"


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of its version 1.2: 3e-4 is a number, `no` and `on` are words; a key stands once."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":bool", ":float", ":timestamp"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"[-+]?(?:(?:\d[\d_]*)?\.\d[\d_]*|\d[\d_]*\.?)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)"
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^(?:{_FLOAT})$"), list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is no word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML text. Raises ConfigError with name, line and column."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe with everything that it extends: `base:` names another file, relative to the one that says so.

    Mappings are merged key by key, the extending file's value wins; any other value is replaced whole. Raises
    ConfigError for a circle, naming it.
    """
    return _read(path.expanduser(), ())


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    here = path.resolve()
    if here in chain:
        circle = " -> ".join(p.name for p in (*chain[chain.index(here) :], here))
        raise ConfigError(f"{chain[-1]}: `base` goes round in a circle: {circle}")
    if not path.exists():
        said = f" (the `base` of {chain[-1]})" if chain else ""
        raise UsageError(f"{path}: no such recipe{said}")
    data = parse_yaml(read_text(path), str(path))
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(data).__name__}")
    base = data.pop(BASE, None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r:.60} must be the path of another recipe")
    return merge(_read(here.parent / Path(base).expanduser(), (*chain, here)), data)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`: mappings are merged, other values replaced; so is a model of another type, as a whole."""
    merged = dict(under)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        if both and "model_type" in value and value["model_type"] != old.get("model_type"):  # type: ignore[union-attr]
            both = False
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def apply_overrides(recipe: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """The recipe with words such as `schedule.kind=wsd` or `train.clip=0.5` applied in order. Values are YAML."""
    result = dict(recipe)
    for word in words:
        path, sign, text = word.partition("=")
        keys = path.split(".")
        if not sign or not all(keys):
            raise UsageError(f"{word!r:.80}: write key=value, for example optimizer.lr=3e-4")
        value: Any = parse_yaml(text, f"the value of {path}")
        for key in reversed(keys):
            value = {key: value}
        result = merge(result, value)
    return result


def dump_yaml(data: Mapping[str, Any]) -> str:
    """A plain tree as a YAML text that `parse_yaml` reads back."""
    text: str = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=120)
    return text
