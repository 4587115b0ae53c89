"""Tokenizers from a Hugging Face model directory: `tokenizer.json`, or what came before it, and the files around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.errors import TokenizerError
from plait.jsonfile import check_readable, read_json_if_there, read_text
from plait.text.backend_errors import backend_errors
from plait.text.configured_tokens import add_to_tokenizer_json
from plait.text.sentencepiece_model import MAX_TOKENIZER_BYTES
from plait.text.tokenizer import CachedMerges, Tokenizer
from plait.text.tokenizer_files import (
    MERGES,
    RANKS,
    SENTENCEPIECE,
    VOCAB,
    build_from_files,
    files_in,
    say_disagreements,
)


def load_directory(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory.

    The ids that end a sequence are all those that generation_config.json, config.json and the tokenizer's `eos_token`
    name. Raises TokenizerError, naming the file.
    """
    file = directory / "tokenizer.json"
    if file.exists():
        backend = _read_tokenizer_json(file)
        with backend_errors(f"{file} cannot be used"):
            settings = add_to_tokenizer_json(backend, directory)
            backend.encode("a\u0301 A")
        config, special_tokens = settings.config, settings.special_tokens
        say_disagreements(directory, backend)
    elif files_in(directory):
        backend, settings = build_from_files(directory, CachedMerges)
        special_tokens = settings.special_tokens
        # What is saved is a tokenizer.json, which the class of the old files would not read.
        config = {**settings.config, **special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        config.pop("auto_map", None)
    else:
        raise TokenizerError(_missing(directory))
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=set(_end_of_sequence(directory, backend, special_tokens)),
        prefix_ids=_prefix(backend, config, special_tokens),
        chat_templates=_chat_templates(directory, config),
        config=config,
    )


def _read_tokenizer_json(file: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    check_readable(file, TokenizerError, MAX_TOKENIZER_BYTES)
    with backend_errors(f"{file} cannot be read"):
        backend = Backend.from_file(str(file))
    if getattr(backend.model, "dropout", None):  # of merges, for training: ids would differ from call to call
        backend.model.dropout = None
    return backend


def _missing(directory: Path) -> str:
    found = [name for name in (VOCAB, MERGES) if (directory / name).exists()]
    if found:
        missing = VOCAB if found == [MERGES] else MERGES
        return f"{directory} has {found[0]} but no {missing}, which belongs to it: download it beside"
    return (
        f"{directory} has no tokenizer: none of tokenizer.json, {SENTENCEPIECE}, {RANKS}, and {VOCAB} with {MERGES};"
        " save one with transformers' AutoTokenizer"
    )


def _read_json(file: Path) -> dict[str, Any]:
    return read_json_if_there(file, TokenizerError)


def _end_of_sequence(directory: Path, backend: Any, special_tokens: Mapping[str, str]) -> Iterator[int]:
    config = _read_json(directory / "config.json")
    inner = config.get("text_config") or {}
    if not isinstance(inner, Mapping):
        raise TokenizerError(f"text_config in {directory / 'config.json'} must be an object, not {inner!r:.80}")
    for source in (_read_json(directory / "generation_config.json"), config, inner):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is int and token_id >= 0:
                yield token_id
            elif token_id is not None:
                raise TokenizerError(f"eos_token_id in {directory} must be an id or a list of ids, not {value!r}")
    own = backend.token_to_id(special_tokens.get("eos_token", ""))
    if own is not None:
        yield own


def _prefix(backend: Any, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> list[int]:
    """What tokenizer.json's post-processor puts before a text; `add_bos_token`, where given, decides about the BOS."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    extra = len(full) - len(bare)
    starts = [start for start in range(extra + 1) if full[start : start + len(bare)] == bare]
    prefix = full[: starts[0]] if starts else []
    bos = backend.token_to_id(special_tokens.get("bos_token", ""))
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise TokenizerError(f"add_bos_token={add_bos!r:.80} in tokenizer_config.json must be true or false")
    if add_bos is False:
        return [token_id for token_id in prefix if token_id != bos]
    return [bos, *prefix] if add_bos and bos is not None and bos not in prefix else prefix


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    value = config.get("chat_template")
    templates = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, Mapping):
        templates = dict(value)
    elif isinstance(value, list) and all(isinstance(e, Mapping) and {"name", "template"} <= e.keys() for e in value):
        templates = {entry["name"]: entry["template"] for entry in value}
    elif value is not None:
        raise TokenizerError(f"chat_template in tokenizer_config.json must be text or named texts, not {value!r:.80}")
    if not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise TokenizerError(f"chat_template in tokenizer_config.json: names and templates must be text: {value!r:.80}")
    file = directory / "chat_template.jinja"
    if file.exists():
        templates["default"] = read_text(file, TokenizerError)
    for other in sorted(directory.glob("additional_chat_templates/*.jinja")):
        templates[other.stem] = read_text(other, TokenizerError)
    return templates
