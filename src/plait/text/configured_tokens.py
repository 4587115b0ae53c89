"""The tokens that the JSON files of a model directory add to a vocabulary: which ones are new, and with which flags.

The rules are those of transformers' tokenizers, so that ids are the same. `added_tokens_decoder` in
tokenizer_config.json, where it is given, has the last word on a token's flags, and the two older files are then not
read: special_tokens_map.json (which else outranks tokenizer_config.json) and added_tokens.json. Named special tokens
(bos_token, eos_token, image_token, ...) and lists of extra ones become added tokens where they are none yet; one that
is there keeps its flags. New tokens are numbered in turn: those that the files describe by id, then named ones, then
lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.errors import TokenizerError
from plait.jsonfile import read_json_if_there

STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DECODER = "added_tokens_decoder"
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Settings:
    """What the files around a tokenizer say. config: their keys together, as tokenizer_config.json has them.
    described: tokens (`tokenizers.AddedToken`) by the ids that the files give them. named: special tokens by name, the
    standard ones and the model's own. extra: those of a list. late: whether that list is the one that transformers
    comes to last, and overwrites with the control pieces of a tokenizer.model."""

    config: Mapping[str, Any]
    described: Mapping[int, Any]
    named: Mapping[str, Any]
    extra: list[Any]
    late: bool = False

    @property
    def special_texts(self) -> list[str]:
        """Of all named and listed tokens, each once."""
        return list(dict.fromkeys([*self.special_tokens.values(), *self.extra_texts]))

    @property
    def extra_texts(self) -> list[str]:
        return [_text(_EXTRA, token) for token in self.extra]

    @property
    def special_tokens(self) -> dict[str, str]:
        """Names and texts."""
        return {name: _text(name, token) for name, token in self.named.items()}

    def with_defaults(self, defaults: Mapping[str, str]) -> Settings:
        """With named tokens of the tokenizer's class where the files do not speak of them. Null says: none."""
        named: dict[str, Any] = {name: text for name, text in defaults.items() if name not in self.config}
        named |= self.named
        return replace(self, named={name: named[name] for name in STANDARD_NAMES if name in named} | named)


def read_settings(directory: Path) -> Settings:
    """What the JSON files of a directory say. Raises TokenizerError, naming the key, for what is no token."""
    config = read_json_if_there(directory / "tokenizer_config.json", TokenizerError)
    says_all = _DECODER in config
    older_map: dict[str, Any] = {}
    if not says_all:
        older_map = read_json_if_there(directory / "special_tokens_map.json", TokenizerError)
        older_map = {name: _always_special(token) for name, token in older_map.items()}
    own = _own_names(config, older_map)
    extra, late = _extra(config, older_map)
    if says_all:
        described = _by_id(config[_DECODER])
    else:
        older = read_json_if_there(directory / "added_tokens.json", TokenizerError)
        listed = {_text(_EXTRA, token) for token in extra}
        described = _from_older_file(older, _known_special(config, older_map), listed)
    config = {**config, **older_map, **{name: own[name] for name in own.keys() & config.keys()}}
    named = {name: config[name] for name in STANDARD_NAMES if config.get(name)} | own
    return Settings(config, described, named, extra, late)


def add_to_tokenizer_json(backend: Any, directory: Path) -> Settings:
    """Add to `backend`, the `tokenizers.Tokenizer` of a tokenizer.json, what the other files of the directory describe.

    Warns where a file gives a token another id than the one that it has. Raises as `read_settings`.
    """
    settings = read_settings(directory)
    if _DECODER not in settings.config:
        taken = backend.get_added_tokens_decoder()
        described = {id: token for id, token in settings.described.items() if id not in taken}
        settings = replace(settings, described=described)
    add_configured_tokens(backend, settings)
    _warn_of_other_ids(backend, settings.described)
    return settings


def add_configured_tokens(
    backend: Any, settings: Settings, further: Iterable[str] = (), in_raw_text: bool = False
) -> None:
    """Add the settings' tokens to `backend`, a `tokenizers.Tokenizer`.

    further: special tokens of the vocabulary itself. in_raw_text: every token is looked for before normalisation,
    whatever its flag says. Raises TokenizerError for what is no token.
    """
    flags_there = {token.content: _flags(token) for token in backend.get_added_tokens_decoder().values()}
    was_special = {text for text, flags in flags_there.items() if flags[_FLAGS.index("special")]}
    named = set(settings.special_tokens.values())
    new: dict[str, Any] = {}
    for _, token in sorted(settings.described.items()):
        if flags_there.get(token.content) != _flags(token):
            new[token.content] = token
    known = flags_there.keys() | new.keys()
    seen: list[Any] = []
    listed = [(_EXTRA, token) for token in (*settings.extra, *further)]
    for name, token in (*settings.named.items(), *listed):
        text = _text(name, token)
        if text not in known and token not in seen:  # of several descriptions of one token the last has its flags
            seen.append(token)
            new[text] = _token(name, token)
            if text not in named and "special" not in token:
                new[text] = _with(new[text], special=True)
    for text in new.keys() & (was_special | named):
        # What was special once stays so: `tokenizers` goes on leaving it out of texts.
        new[text] = new[text] if text in named else _with(new[text])
        new[text].special = True
    if new:  # in one call: every call builds the search automaton anew
        backend.add_tokens([_with(token, normalized=False) if in_raw_text else token for token in new.values()])


def check_ids(backend: Any, settings: Settings, where: str) -> None:
    """Raises TokenizerError where a token has got another id than the files give it, or one that is another token's.

    where: the file of the vocabulary. The files are all that says which id a model was trained with: nothing tells
    whether the one that they give or the one that transformers gives is right.
    """
    vocabulary = backend.get_vocab(with_added_tokens=False)
    for id, token in sorted(settings.described.items()):
        text, own = token.content, backend.token_to_id(token.content)
        if own == id:
            continue
        if not text:
            raise TokenizerError(f"token {id} was added without a text")
        if text in vocabulary:
            raise TokenizerError(f"{text!r:.80} is token {own} in {where}, but was added as token {id}")
        there = next((other for other, its in vocabulary.items() if its == id), None)
        if there is not None:
            raise TokenizerError(f"token {id} is {there!r:.80} in {where}, but {text!r:.80} was added as it")
        raise TokenizerError(
            f"{text!r:.80} was added as token {id}, but transformers numbers added tokens in turn behind {where}, "
            f"so that it would be token {own}; if that is meant, save a tokenizer.json with transformers' AutoTokenizer"
        )
    ids = {id: text for text, id in vocabulary.items()}
    for id, token in backend.get_added_tokens_decoder().items():
        if ids.get(id, token.content) != token.content:
            raise TokenizerError(
                f"{where} has holes among its ids, so that the added token {token.content!r:.80} would become token "
                f"{id}, which is {ids[id]!r:.80}; save a tokenizer.json with transformers' AutoTokenizer"
            )


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


def _extra(config: Mapping[str, Any], older_map: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """The list of further special tokens, under its newer or its older key. special_tokens_map.json's under the older
    one counts only where there is none under the newer."""
    own, there = _own_extra(config), _list(older_map, _EXTRA)
    if own is None and there is None:
        return _list(older_map if _OLDER_EXTRA in older_map else config, _OLDER_EXTRA) or [], True
    own = own or []
    return own + [token for token in there or [] if token not in own], False


def _own_extra(config: Mapping[str, Any]) -> list[Any] | None:
    """What tokenizer_config.json has under the newer key, where its list under the older one then is, too."""
    if isinstance(config.get(_EXTRA), Mapping) and config[_EXTRA]:
        return None
    return _list(config, _EXTRA) or _list(config, _OLDER_EXTRA)


def _list(settings: Mapping[str, Any], key: str) -> list[Any] | None:
    value = settings.get(key)
    if isinstance(value, Mapping) and key == _EXTRA:
        return None
    if not isinstance(value, list | None):
        raise TokenizerError(f"{key} in tokenizer_config.json must be a list of tokens, not {value!r:.80}")
    return value


def _known_special(config: Mapping[str, Any], older_map: Mapping[str, Any]) -> set[str]:
    """Texts of the special tokens that added_tokens.json is compared with: an object in tokenizer_config.json is not
    among them, nor a list in special_tokens_map.json under the older key."""
    named = [(name, older_map.get(name, config.get(name)), name in older_map) for name in STANDARD_NAMES]
    named += [(_EXTRA, token, False) for token in _own_extra(config) or []]
    named += [(_EXTRA, token, True) for token in _list(older_map, _EXTRA) or []]
    return {_text(name, token) for name, token, whole in named if token and (whole or isinstance(token, str))}


def _by_id(decoder: Any) -> dict[int, Any]:
    if not isinstance(decoder, Mapping):
        raise TokenizerError(f"{_DECODER} in tokenizer_config.json must be an object, not {decoder!r:.80}")
    found = {}
    for id, token in decoder.items():
        if not (id.isascii() and id.isdecimal() and len(id) < 10) or not _is_token(token):
            raise TokenizerError(f"{_DECODER} in tokenizer_config.json: {id!r:.80} is no id, or its token is none")
        found[int(id)] = _token(_DECODER, token)
    return found


def _from_older_file(older: Mapping[str, Any], special: set[str], listed: set[str]) -> dict[int, Any]:
    """The tokens of added_tokens.json, which says ids and no flags. listed: further special tokens, which transformers
    does not mark as such here."""
    from tokenizers import AddedToken

    found: dict[int, Any] = {}
    for text, id in older.items():
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < 1 << 31:
            raise TokenizerError(f"added_tokens.json gives {text!r:.80} the id {id!r:.80}, which is none")
        if id in found:
            raise TokenizerError(f"added_tokens.json gives {found[id].content!r:.80} and {text!r:.80} the id {id}")
        found[id] = AddedToken(text, normalized=text not in special, special=text in special | listed)
    return found


def _always_special(token: Any) -> Any:
    """A token of special_tokens_map.json, whose entries do not say that they are special."""
    if isinstance(token, list):
        return [_always_special(entry) for entry in token]
    return {"normalized": False, **token, "special": True} if _is_token(token) else token


def _is_token(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _text(name: str, token: Any) -> str:
    """A token in these files is its text or an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
        raise TokenizerError(f"{name} in tokenizer_config.json must be text or have content, not {token!r:.80}")
    return text


def _token(name: str, token: Any) -> Any:
    """An `AddedToken`; one that is text alone is special."""
    from tokenizers import AddedToken

    flags = {"special": True} if isinstance(token, str) else {flag: token[flag] for flag in _FLAGS if flag in token}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise TokenizerError(f"{name} in tokenizer_config.json: the flags of {token!r:.200} must be true or false")
    return AddedToken(_text(name, token), **flags)


def _with(token: Any, **flags: bool) -> Any:
    """The token with other flags, and all the rest said: `normalized`, left unsaid, would depend on `special`."""
    from tokenizers import AddedToken

    return AddedToken(token.content, **dict(zip(_FLAGS, _flags(token), strict=True)) | flags)


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
