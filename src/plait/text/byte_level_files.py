"""Byte-level BPE from files other than tokenizer.json: `vocab.json` with `merges.txt`, and `tiktoken.model`."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.errors import TokenizerError
from plait.jsonfile import check_readable, read_text
from plait.text.backend_errors import backend_errors
from plait.text.configured_tokens import Settings, add_configured_tokens
from plait.text.detokenizer import byte_of_printable
from plait.text.gguf_tokenizer import MergeStore, stored_merges
from plait.text.pretokenizers import PreTokenizer, pre_tokenizer
from plait.text.sentencepiece_model import MAX_TOKEN_CHARS, MAX_TOKENIZER_BYTES, NORMAL, check_texts
from plait.weights.sources import probable_cause

# How far beyond the number of tokens an id may lie: the table of ids has a place for each up to the largest.
_MAX_GAP = 1 << 16


@dataclass(frozen=True)
class TokenizerClass:
    """What a class that tokenizer_config.json names means for such files.

    pre: the pre-tokeniser's name. special: named tokens that the class has where the files name none. reserved: so many
    ids behind the vocabulary are special tokens, those without a name called <|reserved_token_ID|>. only_texts: whether
    its special tokens have no flags of their own, whatever the files say.
    """

    pre: str
    special: Mapping[str, str]
    reserved: int = 0
    only_texts: bool = False


_END = "<|endoftext|>"
_GPT2 = TokenizerClass("gpt-2", {"bos_token": _END, "eos_token": _END, "unk_token": _END})
_QWEN2 = TokenizerClass("qwen2", {"eos_token": _END, "unk_token": _END, "pad_token": _END}, only_texts=True)
VOCAB_CLASSES = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "Qwen2Tokenizer": _QWEN2,
}
# The classes of model repositories, whose code holds the expression.
RANK_CLASSES = {
    "TikTokenTokenizer": TokenizerClass("kimi-k2", {"bos_token": "[BOS]", "eos_token": "[EOS]"}, reserved=256),
}


def vocab_class(name: str | None, model_type: str | None) -> TokenizerClass:
    """The class for vocab.json and merges.txt, where it is not named that of the model's type in transformers.

    Raises TokenizerError for a class that plait does not know: its words may be cut in other places.
    """
    if name is None:
        return _QWEN2 if str(model_type).startswith("qwen") else _GPT2
    found = VOCAB_CLASSES.get(name.removesuffix("Fast"))
    if found is None:
        raise TokenizerError(
            f"tokenizer_class {name!r:.80} is not known for vocab.json and merges.txt (known: "
            f"{', '.join(VOCAB_CLASSES)}); save a tokenizer.json with transformers' AutoTokenizer"
        )
    return found


def rank_class(name: str | None) -> TokenizerClass:
    """The class for tiktoken.model. Raises TokenizerError where it is not named or not known."""
    found = RANK_CLASSES.get(name or "")
    if found is None:
        raise TokenizerError(
            f"tokenizer_class {name!r:.80} in tokenizer_config.json is not known for tiktoken.model (known: "
            f"{', '.join(RANK_CLASSES)}), and the file itself does not say where words are cut"
        )
    return found


def _names_of(kind: TokenizerClass) -> str:
    return " and ".join(name for name, known in VOCAB_CLASSES.items() if known is kind)


def read_vocab(path: Path) -> dict[str, int]:
    """Texts and ids of a vocab.json. Raises TokenizerError, naming the file."""
    check_readable(path, TokenizerError, MAX_TOKENIZER_BYTES)
    try:
        data = json.loads(read_text(path, TokenizerError), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {str(error)[:200]}") from error
    if not isinstance(data, dict) or not data:
        raise TokenizerError(f"{path} must hold a JSON object of tokens and ids")
    for text, id in data.items():
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < len(data) + _MAX_GAP:
            raise TokenizerError(f"{path}: {id!r:.40} is no id of token {text!r:.80} among {len(data)}")
        if len(text) > MAX_TOKEN_CHARS:
            raise TokenizerError(f"{path}: token {id} has {len(text)} characters (at most {MAX_TOKEN_CHARS})")
    if len(set(data.values())) != len(data):
        raise TokenizerError(f"{path} gives one id to two tokens")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("it names a token twice")
    return data


def read_merges(path: Path) -> list[tuple[str, str]]:
    """The pairs of a merges.txt, best first. Raises TokenizerError, naming file and line."""
    lines = read_text(path, TokenizerError).split("\n")
    pairs = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise TokenizerError(f"{path}, line {number}: {line!r:.80} is not a pair of tokens")
        pairs.append((parts[0], parts[1]))
    return pairs


def build_from_vocab(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    settings: Settings,
    kind: TokenizerClass,
    where: str,
    add_prefix_space: bool = False,
) -> Any:
    """The `tokenizers.Tokenizer` of vocab.json and merges.txt. Raises TokenizerError."""
    from tokenizers import AddedToken, pre_tokenizers

    for pair in merges:
        if not (pair[0] in vocabulary and pair[1] in vocabulary and pair[0] + pair[1] in vocabulary):
            raise TokenizerError(f"{where}: vocabulary and merges do not fit each other: {pair} makes no token")
    if add_prefix_space and kind is not _GPT2:
        raise TokenizerError(f"add_prefix_space with {where} is supported for {_names_of(_GPT2)} only")
    backend = _byte_level(dict(vocabulary), merges, pre_tokenizer(kind.pre), where)
    if add_prefix_space:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    add_configured_tokens(backend, settings)
    if kind.only_texts:
        backend.add_tokens([AddedToken(text, special=True) for text in settings.special_texts])
    return backend


def read_ranks(path: Path) -> list[str]:
    """The tokens of a tiktoken.model by rank, their bytes spelled in GPT-2's alphabet.

    A line is the base64 of a token's bytes, a space and its rank; ranks are 0, 1, 2, ... in any order. Raises
    TokenizerError, naming file and line.
    """
    check_readable(path, TokenizerError, MAX_TOKENIZER_BYTES)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from error
    printable = {byte: character for character, byte in byte_of_printable().items()}
    tokens: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        word, _, rank = line.strip().partition(b" ")
        try:
            token = base64.b64decode(word, validate=True)
        except (binascii.Error, ValueError):
            token = b""
        if not token or not rank.isdigit() or len(rank) > 9:
            cause = probable_cause(b"\n".join(lines[:4])[:256])
            raise TokenizerError(f"{path}, line {number}: {line!r:.80} is not a token in base64 and its rank; {cause}")
        if int(rank) in tokens:
            raise TokenizerError(f"{path}, line {number}: rank {int(rank)} is there twice")
        tokens[int(rank)] = "".join(map(printable.__getitem__, token))
    return _dense(tokens, path)


def _dense(tokens: dict[int, str], path: Path) -> list[str]:
    missing = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if missing is not None or not tokens:
        raise TokenizerError(f"{path}: {len(tokens)} tokens, but none of rank {missing or 0}")
    texts = [tokens[rank] for rank in range(len(tokens))]
    check_texts(texts, str(path))
    single = sum(len(text) == 1 for text in texts)
    if single != 256:
        raise TokenizerError(f"{path}: tokens for {single} of the 256 bytes; every byte needs one")
    return texts


def build_from_ranks(
    tokens: list[str],
    settings: Settings,
    kind: TokenizerClass,
    where: str,
    store: MergeStore | None = None,
) -> Any:
    """The `tokenizers.Tokenizer` of a tiktoken.model: of two neighbours that make a token those are joined first whose
    token has the lowest rank. Raises TokenizerError."""
    from tokenizers import AddedToken

    vocabulary = {token: rank for rank, token in enumerate(tokens)}
    merges = stored_merges(tokens, [NORMAL] * len(tokens), range(0, -len(tokens), -1), store)
    backend = _byte_level(vocabulary, merges, pre_tokenizer(kind.pre), where)
    reserved = {id: f"<|reserved_token_{id}|>" for id in range(len(tokens), len(tokens) + kind.reserved)}
    reserved = {id: text for id, text in reserved.items() if id not in settings.described}
    described = {id: AddedToken(text, special=True) for id, text in reserved.items()} | dict(settings.described)
    add_configured_tokens(backend, replace(settings, described=described))
    return backend


def _byte_level(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], rules: PreTokenizer, where: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    with backend_errors(f"{where}: vocabulary and merges do not fit each other"):
        model = models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=rules.ignore_merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    return backend
