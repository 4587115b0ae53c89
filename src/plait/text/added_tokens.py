"""The tokens that the JSON files of a model directory add to a vocabulary, and their places in it.

`added_tokens_decoder` of tokenizer_config.json says id, text and flags, added_tokens.json texts and ids, and
special_tokens_map.json and the named tokens of tokenizer_config.json texts, sometimes with flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.errors import TokenizerError

_DECODER = "added_tokens_decoder"
# How far beyond the vocabulary an id may lie: the table of ids has a place for each up to the largest.
MAX_GAP = 1 << 16
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@dataclass(frozen=True)
class AddedEntry:
    """One token. id: None where the files leave it open. flags: of `tokenizers.AddedToken`; absent ones are default."""

    text: str
    id: int | None
    flags: Mapping[str, bool]

    @property
    def special(self) -> bool:
        return self.flags.get("special", False)


def says_all(config: Mapping[str, Any]) -> bool:
    """Whether a tokenizer_config.json describes the added tokens itself: special_tokens_map.json, which else outranks
    it, and added_tokens.json then do not count. The rule is transformers'."""
    return _DECODER in config


def added_entries(
    config: Mapping[str, Any], added: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> list[AddedEntry]:
    """Every added token once: those with an id first, by id.

    config: special_tokens_map.json and tokenizer_config.json together; added: added_tokens.json; special_tokens: the
    texts of named tokens. Raises TokenizerError for what is no token, and where two files disagree about an id.
    """
    special = {*special_tokens.values(), *(_entry(item, None).text for name in _LISTS for item in _items(config, name))}
    found: dict[str, AddedEntry] = {}
    for place, entry in _with_ids(config, added):
        known = found.get(entry.text)
        if known is not None and known.id != entry.id:
            raise TokenizerError(f"{place} gives {entry.text!r:.80} id {entry.id}, another file id {known.id}")
        found.setdefault(entry.text, entry)
    by_id: dict[int, str] = {}
    for entry in found.values():
        assert entry.id is not None
        if by_id.setdefault(entry.id, entry.text) != entry.text:
            raise TokenizerError(f"added tokens {by_id[entry.id]!r:.80} and {entry.text!r:.80} both have id {entry.id}")
    for name in _LISTS:
        for item in _items(config, name):
            entry = _entry(item, None)
            found.setdefault(entry.text, entry)
    for name, text in special_tokens.items():
        item = config.get(name)
        found.setdefault(text, _entry(item if isinstance(item, Mapping) else text, None))
    marked = (replace(e, flags={**e.flags, "special": True}) if e.text in special else e for e in found.values())
    return sorted(marked, key=lambda entry: (entry.id is None, entry.id or 0))


def _with_ids(config: Mapping[str, Any], added: Mapping[str, Any]) -> Iterable[tuple[str, AddedEntry]]:
    decoder = config.get(_DECODER) or {}
    if not isinstance(decoder, Mapping):
        raise TokenizerError(f"added_tokens_decoder in tokenizer_config.json must be an object, not {decoder!r:.60}")
    for key, item in decoder.items():
        id = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        yield "added_tokens_decoder", _entry(item, _id(id, f"added_tokens_decoder: {key!r:.40}"))
    for text, id in added.items():
        yield "added_tokens.json", AddedEntry(_text(text, text), _id(id, f"added_tokens.json: {text!r:.40}"), {})


def _id(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise TokenizerError(f"{where}: {value!r:.40} is no token id")
    return value


def _items(config: Mapping[str, Any], name: str) -> list[Any]:
    value = config.get(name) or []
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list):
        raise TokenizerError(f"{name} in tokenizer_config.json must be a list of tokens, not {value!r:.60}")
    return value


def _entry(item: Any, id: int | None) -> AddedEntry:
    if not isinstance(item, Mapping):
        return AddedEntry(_text(item, item), id, {})
    flags = {name: item[name] for name in _FLAGS if item.get(name) is not None}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise TokenizerError(f"the flags of the added token {item!r:.120} must be true or false")
    return AddedEntry(_text(item.get("content"), item), id, flags)


def _text(text: Any, item: Any) -> str:
    if not isinstance(text, str) or not text:
        raise TokenizerError(f"an added token must be text or have content, not {item!r:.80}")
    return text


def place(entries: Iterable[AddedEntry], vocabulary: Mapping[str, int], where: str) -> dict[str, int]:
    """Ids of all entries: their own, that of the same text in the vocabulary, or the next free one.

    vocabulary: texts and ids of `where`, a file. Raises TokenizerError where an id belongs to two texts, a text to two
    ids, or an id lies far beyond all others.
    """
    taken = {id: text for text, id in vocabulary.items()}
    last = max(taken, default=-1)
    placed: dict[str, int] = {}
    for entry in entries:
        own = vocabulary.get(entry.text)
        id = (last + 1 if own is None else own) if entry.id is None else entry.id
        if own is not None and own != id:
            raise TokenizerError(f"{entry.text!r:.80} is token {own} in {where}, but was added as token {id}")
        if taken.get(id, entry.text) != entry.text:
            raise TokenizerError(f"token {id} is {taken[id]!r:.80} in {where}, but {entry.text!r:.80} was added as it")
        if id > last + MAX_GAP:
            raise TokenizerError(f"{entry.text!r:.80} was added as token {id}, but {where} ends at token {last}")
        placed[entry.text] = id
        taken[id] = entry.text
        last = max(last, id)
    return placed


def register(backend: Any, entries: Iterable[AddedEntry], normalized: bool = True) -> None:
    """Have `tokenizers` look for these tokens in a text. normalized: whether an entry that is not special is looked
    for after normalisation where it does not say itself; False: never."""
    from tokenizers import AddedToken

    special: list[Any] = []
    plain: list[Any] = []
    for entry in entries:
        flags = {"normalized": not entry.special, **entry.flags}
        flags["normalized"] &= normalized
        flags.pop("special", None)
        token = AddedToken(entry.text, special=entry.special, **flags)
        (special if entry.special else plain).append(token)
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
