"""The tokenizers of directories without tokenizer.json: which file counts, and what the JSON files beside it add."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from plait.errors import TokenizerError
from plait.jsonfile import read_json_if_there
from plait.text.added_tokens import AddedEntry, added_entries, says_all
from plait.text.byte_level_files import (
    TokenizerClass,
    build_from_ranks,
    build_from_vocab,
    rank_class,
    read_merges,
    read_ranks,
    read_vocab,
    vocab_class,
)
from plait.text.gguf_tokenizer import MergeStore, set_prefix
from plait.text.sentencepiece_model import NORMAL, read_model
from plait.text.sentencepiece_tokenizer import build_backend

log = logging.getLogger("plait.tokenizer")

# In order of precedence, after tokenizer.json.
SENTENCEPIECE, RANKS, VOCAB, MERGES = "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt"


def files_in(directory: Path) -> list[str]:
    """The tokenizer files that a directory has beside tokenizer.json, the one that counts first."""
    found = [name for name in (SENTENCEPIECE, RANKS) if (directory / name).exists()]
    return found + [VOCAB] * all((directory / name).exists() for name in (VOCAB, MERGES))


def build_from_files(
    directory: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str], store: Callable[[Path], MergeStore]
) -> tuple[Any, dict[str, str]]:
    """The `tokenizers.Tokenizer` of the first of `files_in`, and its named tokens.

    config: special_tokens_map.json and tokenizer_config.json together; special_tokens: the named tokens in it; store:
    gives the store for the merges of a file. Raises TokenizerError, naming the file.
    """
    name, *others = files_in(directory)
    if others:
        log.warning("%s has %s too; %s is used", directory, " and ".join(others), name)
    added = {} if says_all(config) else read_json_if_there(directory / "added_tokens.json", TokenizerError)
    path = directory / name

    named = dict(special_tokens)

    def entries(defaults: Mapping[str, str]) -> list[AddedEntry]:
        # A token that the files name as null is none.
        named.update({role: text for role, text in defaults.items() if role not in config})
        return added_entries(config, added, named)

    tokenizer_class = config.get("tokenizer_class")
    if tokenizer_class is not None and not isinstance(tokenizer_class, str):
        raise TokenizerError(f"tokenizer_class in tokenizer_config.json must be text, not {tokenizer_class!r:.80}")
    if name == SENTENCEPIECE:
        model = read_model(path)
        ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
        backend = build_backend(
            model,
            entries({role: model.pieces[id] for role, id in ids.items() if id is not None}),
            where=str(path),
            legacy=_flag(config, "legacy", True),
            add_prefix_space=_flag(config, "add_prefix_space", True),
            store=store(path),
        )
    elif name == RANKS:
        kind = rank_class(tokenizer_class)
        there = {entry.text for entry in added_entries(config, added, named)}
        backend = build_from_ranks(read_ranks(path), entries(_known(kind, there)), kind, str(path), store(path))
    else:
        model_config = read_json_if_there(directory / "config.json", TokenizerError)
        kind = vocab_class(tokenizer_class, model_config.get("model_type"))
        vocabulary = read_vocab(path)
        known = _known(kind, vocabulary)
        prefix_space = _flag(config, "add_prefix_space", False)
        merges = read_merges(directory / MERGES)
        backend = build_from_vocab(vocabulary, merges, entries(known), kind, str(path), prefix_space)
    bos = backend.token_to_id(named.get("bos_token", ""))
    if bos is not None and _flag(config, "add_bos_token", name == SENTENCEPIECE):
        set_prefix(backend, [(named["bos_token"], bos)])
    return backend, named


def _known(kind: TokenizerClass, texts: Container[str]) -> dict[str, str]:
    """The class's own named tokens, as far as these texts have them."""
    return {role: text for role, text in kind.special.items() if text in texts}


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise TokenizerError(f"{name} in tokenizer_config.json must be true or false, not {value!r:.40}")
    return value


def say_disagreements(directory: Path, backend: Any) -> None:
    """Tell where a tokenizer.json, which counts, and the files beside it give one id to different tokens."""
    for name in files_in(directory):
        try:
            tokens = _TOKENS[name](directory / name)
            wrong = [(id, text) for id, text in tokens if backend.id_to_token(id) != text]
        except TokenizerError as error:
            log.warning("%s; tokenizer.json is used", error)
            continue
        if wrong:
            id, text = wrong[0]
            log.warning(
                "%s: tokenizer.json and %s disagree about %d tokens (the first: %d is %.80r and %.80r); "
                "tokenizer.json is used",
                directory,
                name,
                len(wrong),
                id,
                backend.id_to_token(id),
                text,
            )


def _ordinary_pieces(path: Path) -> Iterable[tuple[int, str]]:
    # Tokenizers are published with other names for control and unused pieces.
    model = read_model(path)
    return ((id, text) for id, text in enumerate(model.pieces) if model.types[id] == NORMAL)


_TOKENS: dict[str, Callable[[Path], Iterable[tuple[int, str]]]] = {
    SENTENCEPIECE: _ordinary_pieces,
    RANKS: lambda path: enumerate(read_ranks(path)),
    VOCAB: lambda path: ((id, text) for text, id in read_vocab(path).items()),
}


def facts_of_files(directory: Path) -> dict[str, Any] | None:
    """For `plait inspect`: kind, file and number of tokens of what `build_from_files` would read."""
    names = files_in(directory)
    if not names:
        return None
    facts: dict[str, Any] = {"kind": None, "file": names[0]}
    try:
        if names[0] == SENTENCEPIECE:
            model = read_model(directory / names[0])
            facts |= {"kind": f"SentencePiece {model.kind_name}", "tokens": len(model.pieces)}
        elif names[0] == RANKS:
            facts |= {"kind": "tiktoken", "tokens": len(read_ranks(directory / names[0]))}
        else:
            facts |= {"kind": "BPE", "tokens": len(read_vocab(directory / names[0]))}
            facts["merges"] = len(read_merges(directory / MERGES))
    except TokenizerError as error:
        facts["problem"] = str(error)
    return facts
