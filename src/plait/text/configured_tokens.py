"""Added tokens that the files beside a tokenizer.json describe: which ones are new, and with which flags.

The rules are those of transformers' tokenizers, so that ids are the same. `added_tokens_decoder` in
tokenizer_config.json, where it is given, has the last word on a token's flags, and the two older files are then not
read: special_tokens_map.json (which else outranks tokenizer_config.json) and added_tokens.json. Named special tokens
(bos_token, eos_token, image_token, ...) and lists of extra ones become added tokens where they are none yet; one that
is there keeps its flags.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import TokenizerError
from plait.jsonfile import read_json_if_there
from plait.text.added_tokens import says_all

STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DECODER = "added_tokens_decoder"
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Settings:
    """What the files around a tokenizer.json say. config: their keys together, as tokenizer_config.json has them.
    special_tokens: names (of the standard ones and of the model's own) and texts."""

    config: Mapping[str, Any]
    special_tokens: Mapping[str, str]


def add_configured_tokens(backend: Any, directory: Path) -> Settings:
    """Add to `backend` (a `tokenizers.Tokenizer`) what the other files of the directory describe.

    Warns where added_tokens_decoder gives a token another id than the one that it has. Raises TokenizerError, naming
    the key, for what is no token.
    """
    config = read_json_if_there(directory / "tokenizer_config.json", TokenizerError)
    described: dict[int, Any] = {}
    older_map: dict[str, Any] = {}
    if says_all(config):
        described = _by_id(config[_DECODER])
    else:
        older_map = read_json_if_there(directory / "special_tokens_map.json", TokenizerError)
        if isinstance(config.get(_EXTRA), list) and isinstance(older_map.get(_EXTRA), list):
            older_map[_EXTRA] = [*config[_EXTRA], *older_map[_EXTRA]]
    own = _own_names(config, older_map)
    config = {**config, **older_map, **{name: own[name] for name in own.keys() & config.keys()}}
    named = {name: config[name] for name in STANDARD_NAMES if config.get(name)} | own
    extra = _extra(config)
    if not says_all(config):
        known = {_text(name, token) for name, token in (*named.items(), *((_EXTRA, token) for token in extra))}
        older = read_json_if_there(directory / "added_tokens.json", TokenizerError)
        taken = backend.get_added_tokens_decoder()
        described = {id: token for id, token in _from_older_file(older, known).items() if id not in taken}
    _add(backend, described, named, extra)
    _warn_of_other_ids(backend, described)
    return Settings(config, {name: _text(name, token) for name, token in named.items()})


def _add(backend: Any, described: Mapping[int, Any], named: Mapping[str, Any], extra: Iterable[Any]) -> None:
    flags_there = {token.content: _flags(token) for token in backend.get_added_tokens_decoder().values()}
    special = {text for text, flags in flags_there.items() if flags[_FLAGS.index("special")]}
    special |= {_text(name, token) for name, token in named.items()}
    new: dict[str, Any] = {}
    for _, token in sorted(described.items()):
        if flags_there.get(token.content) != _flags(token):
            new[token.content] = token
    for name, token in (*named.items(), *((_EXTRA, token) for token in extra)):
        text = _text(name, token)
        if text not in flags_there and text not in new:
            new[text] = _token(name, token)
    for text in new.keys() & special:  # what was special once stays so: `tokenizers` goes on leaving it out of texts
        new[text].special = True
    if new:  # in one call: every call builds the search automaton anew
        backend.add_tokens(list(new.values()))


def _own_names(config: Mapping[str, Any], older_map: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens that a model has names of its own for, image_token and the like, in the order in which they are
    added: those with flags, then those that are text alone."""
    ours, older = (
        {key: value for key, value in settings.items() if key.endswith("_token") and key not in STANDARD_NAMES}
        for settings in (config, older_map)
    )
    found = {key: value for key, value in ours.items() if _is_token(value)}
    found |= {key: value for key, value in older.items() if isinstance(value, str) or _is_token(value)}
    found |= {key: value for key, value in ours.items() if isinstance(value, str)}
    for key in ("model_specific_special_tokens", _EXTRA):
        for settings in (config, older_map):
            if isinstance(settings.get(key), Mapping):
                found |= settings[key]
    return {key: value for key, value in found.items() if value}


def _extra(config: Mapping[str, Any]) -> list[Any]:
    """The list of further special tokens, under its newer or its older key."""
    value = config.get(_EXTRA) or config.get(_OLDER_EXTRA) or []
    if isinstance(value, Mapping):
        return []
    if not isinstance(value, list):
        raise TokenizerError(f"{_OLDER_EXTRA} in tokenizer_config.json must be a list of tokens, not {value!r:.80}")
    return value


def _by_id(decoder: Any) -> dict[int, Any]:
    if not isinstance(decoder, Mapping):
        raise TokenizerError(f"{_DECODER} in tokenizer_config.json must be an object, not {decoder!r:.80}")
    found = {}
    for id, token in decoder.items():
        if not id.isdecimal() or not _is_token(token):
            raise TokenizerError(f"{_DECODER} in tokenizer_config.json: {id!r:.80} is no id, or its token is none")
        found[int(id)] = _token(_DECODER, token)
    return found


def _from_older_file(older: Mapping[str, Any], special: set[str]) -> dict[int, Any]:
    """The tokens of added_tokens.json, which says ids and no flags."""
    from tokenizers import AddedToken

    found = {}
    for text, id in older.items():
        if not isinstance(id, int) or isinstance(id, bool) or id < 0:
            raise TokenizerError(f"added_tokens.json gives {text!r:.80} the id {id!r:.80}, which is none")
        found[id] = AddedToken(text, normalized=text not in special, special=text in special)
    return found


def _is_token(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _text(name: str, token: Any) -> str:
    """A token in these files is its text or an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
        raise TokenizerError(f"{name} in tokenizer_config.json must be text or have content, not {token!r:.80}")
    return text


def _token(name: str, token: Any) -> Any:
    """An `AddedToken`; one that is text alone is special, and so is one that is named and does not say."""
    from tokenizers import AddedToken

    flags = {} if isinstance(token, str) else {flag: token[flag] for flag in _FLAGS if flag in token}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise TokenizerError(f"{name} in tokenizer_config.json: the flags of {token!r:.200} must be true or false")
    return AddedToken(_text(name, token), **({} if name == _DECODER else {"special": True}) | flags)


def _flags(token: Any) -> tuple[bool, ...]:
    return tuple(getattr(token, flag) for flag in _FLAGS)


def _warn_of_other_ids(backend: Any, described: Mapping[int, Any]) -> None:
    """A vocabulary has no holes before its added tokens: they are numbered in turn, whatever a file says."""
    found = {token.content: (id, backend.token_to_id(token.content)) for id, token in described.items()}
    other = [f"{text!r} is {own}, not {said}" for text, (said, own) in found.items() if own != said]
    if other:
        warnings.warn(
            f"the tokenizer's files disagree about the ids of {len(other)} added tokens: {'; '.join(other[:3])}; "
            "the first of each two is used, as transformers does",
            stacklevel=4,
        )
