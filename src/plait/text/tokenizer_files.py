"""The tokenizers of directories without tokenizer.json: which file counts, and what the JSON files beside it add."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.errors import TokenizerError
from plait.jsonfile import read_json_if_there
from plait.text.byte_level_files import (
    build_from_ranks,
    build_from_vocab,
    rank_class,
    read_merges,
    read_ranks,
    read_vocab,
    vocab_class,
)
from plait.text.configured_tokens import Settings, check_ids, read_settings
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


def build_from_files(directory: Path, store: Callable[[Path], MergeStore]) -> tuple[Any, Settings]:
    """The `tokenizers.Tokenizer` of the first of `files_in`, and what the files beside it say.

    store: gives the store for the merges of a file. Raises TokenizerError, naming the file.
    """
    name, *others = files_in(directory)
    if others:
        log.warning("%s has %s too; %s is used", directory, " and ".join(others), name)
    path = directory / name
    settings = read_settings(directory)
    config = settings.config
    tokenizer_class = config.get("tokenizer_class")
    if tokenizer_class is not None and not isinstance(tokenizer_class, str):
        raise TokenizerError(f"tokenizer_class in tokenizer_config.json must be text, not {tokenizer_class!r:.80}")
    if name == SENTENCEPIECE:
        model = read_model(path)
        ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
        settings = _without_late(settings, [*model.control_pieces, model.pieces[model.unk_id]], str(path))
        texts = dict(enumerate(model.pieces)) | {id: token.content for id, token in settings.described.items()}
        settings = settings.with_defaults({role: texts[id] for role, id in ids.items() if id is not None})
        backend = build_backend(
            model,
            settings,
            where=str(path),
            legacy=_flag(config, "legacy", True),
            add_prefix_space=_flag(config, "add_prefix_space", True),
            store=store(path),
        )
    elif name == RANKS:
        kind = rank_class(tokenizer_class)
        there = {token.content for token in settings.described.values()}
        settings = settings.with_defaults({role: text for role, text in kind.special.items() if text in there})
        backend = build_from_ranks(read_ranks(path), settings, kind, str(path), store(path))
    else:
        model_config = read_json_if_there(directory / "config.json", TokenizerError)
        kind = vocab_class(tokenizer_class, model_config.get("model_type"))
        settings = settings.with_defaults(kind.special)
        prefix_space = _flag(config, "add_prefix_space", False)
        merges = read_merges(directory / MERGES)
        backend = build_from_vocab(read_vocab(path), merges, settings, kind, str(path), prefix_space)
    check_ids(backend, settings, str(path))
    bos_text = settings.special_tokens.get("bos_token", "")
    bos = backend.token_to_id(bos_text)
    if bos is not None and _flag(config, "add_bos_token", name == SENTENCEPIECE):
        set_prefix(backend, [(bos_text, bos)])
    return backend, settings


def _without_late(settings: Settings, controls: list[str], where: str) -> Settings:
    """The settings without a list that does not count beside a tokenizer.model. Raises TokenizerError where it has
    tokens that nothing else speaks of."""
    known = {*(token.content for token in settings.described.values()), *settings.special_tokens.values(), *controls}
    for text in settings.extra_texts if settings.late else ():
        if text not in known:
            raise TokenizerError(
                f"additional_special_tokens has {text!r:.80}, but no file beside {where} gives it an id, and "
                "transformers leaves it out; name it in added_tokens_decoder of tokenizer_config.json, with its id"
            )
    return replace(settings, extra=[]) if settings.late else settings


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
