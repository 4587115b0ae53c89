"""Tokenizers from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece with scores (`llama`)."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.errors import TokenizerError
from plait.text.backend_errors import backend_errors
from plait.text.pretokenizers import pre_tokenizer
from plait.text.sentencepiece_model import MAX_TOKEN_CHARS
from plait.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
# tokenizer.ggml.token_type, as GGUF numbers it
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# Texts that end a turn in models whose file names no eot token.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_WORD_START = "\u2581"


class MergeStore(Protocol):
    """Keeps the list of merges that a SentencePiece vocabulary implies, which takes seconds to work out."""

    def load(self) -> NDArray[np.int32] | None:
        """What `save` was given for this file: ids of left and right part, [n, 2]; None where there is nothing."""
        ...

    def save(self, merges: NDArray[np.int32]) -> None: ...


def build_tokenizer(metadata: Mapping[str, Any], store: MergeStore | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Args:
        metadata: the file's key-value pairs; the `tokenizer.ggml.*` keys and `tokenizer.chat_template` are read.
        store: where merges that are not in the file are kept from one process to the next.

    Raises:
        TokenizerError: a key is missing or names something that plait does not know.
    """
    # Hundreds of thousands of strings and pairs come into being, none of which the collector could free.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _build_tokenizer(metadata, store)
    finally:
        if collecting:
            gc.enable()


def _build_tokenizer(metadata: Mapping[str, Any], store: MergeStore | None) -> Tokenizer:
    model = metadata.get(_PREFIX + "model")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(f"tokenizer.ggml.model {model!r} is not supported (known: 'gpt2', 'llama')")
    tokens = _tokens(metadata)
    types = _listed(metadata, "token_type", int) or [1] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if model == "gpt2":
        backend, add_bos = _byte_level_backend(metadata, tokens)
    else:
        backend, add_bos = _sentencepiece_backend(metadata, tokens, types, store), True
    named = {
        name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    eos_ids = _end_of_sequence(named, tokens, types)
    _add_tokens(backend, tokens, types, special={id for id in named.values() if id is not None} | eos_ids)
    bos = named["bos"] if _flag(metadata, "add_bos_token", add_bos) else None
    prefix = [] if bos is None else [bos]
    set_prefix(backend, [(tokens[id], id) for id in prefix])
    special_tokens = {
        f"{name}_token": tokens[id]
        for name, id in (
            ("bos", named["bos"]),
            ("eos", named["eos"]),
            ("unk", named["unknown"]),
            ("pad", named["padding"]),
        )
        if id is not None
    }
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=eos_ids,
        prefix_ids=prefix,
        chat_templates=_chat_templates(metadata),
        config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": bool(prefix),
            **special_tokens,
        },
        vocab_size=len(tokens),
    )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _listed(metadata, "tokens", str)
    if not tokens:
        raise TokenizerError("tokenizer.ggml.tokens is missing; the file has no vocabulary")
    if not all(tokens):
        # llama.cpp's stand-in for a token without a text
        tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        raise TokenizerError("tokenizer.ggml.tokens holds a token twice")
    return tokens


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < count:
        raise TokenizerError(f"{key} is {value!r:.80}, but there are {count} tokens")
    return value


def _listed(metadata: Mapping[str, Any], name: str, *kinds: type) -> list[Any]:
    """An array of elements of these types; an empty one where the key is absent."""
    value = metadata.get(_PREFIX + name, [])
    if not isinstance(value, list) or not set(map(type, value)) <= set(kinds):
        wanted = {str: "texts", int: "whole numbers"}.get(kinds[0], "numbers")
        raise TokenizerError(f"{_PREFIX}{name} must be an array of {wanted}, not {value!r:.80}")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{_PREFIX}{name} must be true or false, not {value!r:.80}")
    return value


def _end_of_sequence(named: Mapping[str, int | None], tokens: Sequence[str], types: Sequence[int]) -> set[int]:
    ids = {named[name] for name in ("eos", "eot", "eom")} - {None}
    if named["eot"] is None:
        known = set(_END_OF_TURN)
        ids |= {id for id, token in enumerate(tokens) if token in known and types[id] in (_CONTROL, _USER_DEFINED)}
    return ids  # type: ignore[return-value]


def _byte_level_backend(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Any, bool]:
    """The backend, and whether a BOS stands before a prompt if the file does not say."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    name = metadata.get(_PREFIX + "pre")
    if name is None:
        name = "default"
        warnings.warn(
            "tokenizer.ggml.pre is missing from the file; the 'default' pre-tokeniser is used, as llama.cpp does, "
            "and may split text in other places than the model's own",
            stacklevel=2,
        )
    if not isinstance(name, str):
        raise TokenizerError(f"tokenizer.ggml.pre must be a name, not {name!r:.60}")
    rules = pre_tokenizer(name)
    if _PREFIX + "merges" not in metadata:
        raise TokenizerError("tokenizer.ggml.merges is missing; a 'gpt2' tokenizer needs it")
    pairs = [_merge(text) for text in _listed(metadata, "merges", str)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Backend(_bpe(models.BPE, vocabulary, pairs, ignore_merges=rules.ignore_merges))
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, rules.add_bos


def _merge(text: str) -> tuple[str, str]:
    """A merge is "left right"; the space cannot be the first character of the left part."""
    left, _, right = text.partition(" ")
    if not left:
        cut = text.find(" ", 1)
        return text[:cut], text[cut + 1 :]
    return left, right


def _sentencepiece_backend(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], store: MergeStore | None
) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = _listed(metadata, "scores", float, int)
    if len(scores) != len(tokens):
        raise TokenizerError("tokenizer.ggml.scores is missing or of another length; a 'llama' tokenizer needs it")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARS:
        raise TokenizerError(f"tokenizer.ggml.tokens has one of {longest} characters (at most {MAX_TOKEN_CHARS})")
    unknown = _token_id(metadata, "unknown", len(tokens))
    backend = Backend(
        _bpe(
            models.BPE,
            {token: id for id, token in enumerate(tokens)},
            stored_merges(tokens, types, scores, store),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    prefixed = _flag(metadata, "add_space_prefix", True)
    start = [normalizers.Prepend(_WORD_START)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", _WORD_START)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def stored_merges(
    tokens: list[str], types: list[int], scores: Sequence[float], store: MergeStore | None
) -> list[tuple[str, str]]:
    """`merges_from_scores` as texts, from the store where it has them."""
    ids = None if store is None else store.load()
    if ids is None:
        ids = merges_from_scores(tokens, types, scores)
        if store is not None:
            store.save(ids)
    return list(zip(*(map(tokens.__getitem__, column) for column in ids.T.tolist()), strict=True))


def merges_from_scores(tokens: list[str], types: list[int], scores: Sequence[float]) -> NDArray[np.int32]:
    """SentencePiece joins the neighbours whose joint text has the best score. As a list of merges that is: every split
    of every token into two tokens, best score first; of one token's splits the longer left part first, because of
    overlapping places the leftmost is joined first. Returns the ids of both parts, [n, 2]."""
    excluded = (_CONTROL, _UNKNOWN, _BYTE)
    if np.isnan(np.asarray(scores, np.float64)).any():
        raise TokenizerError("tokenizer.ggml.scores holds a NaN, which is neither better nor worse than another score")
    usable = {token: id for id, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind not in excluded}
    order = sorted(usable.values(), key=lambda id: (-scores[id], id))
    merges = []
    for id in order:
        token = tokens[id]
        for cut in range(len(token) - 1, 0, -1):
            left = usable.get(token[:cut])
            if left is not None:
                right = usable.get(token[cut:])
                if right is not None:
                    merges.append((left, right))
    return np.array(merges, np.int32).reshape(-1, 2)


def _bpe(model: Any, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    with backend_errors("the GGUF vocabulary and merges do not fit each other"):
        return model(vocab=vocabulary, merges=merges, **options)


def _add_tokens(backend: Any, tokens: list[str], types: list[int], special: set[int]) -> None:
    """Control tokens become special; user-defined ones are found in text before anything else, but are text."""
    from tokenizers import AddedToken

    controls = [id for id, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN) or id in special]
    plain = [id for id, kind in enumerate(types) if kind == _USER_DEFINED and id not in special]
    backend.add_special_tokens([AddedToken(tokens[id], normalized=False, special=True) for id in controls])
    backend.add_tokens([AddedToken(tokens[id], normalized=False, special=False) for id in plain])


def set_prefix(backend: Any, named: Sequence[tuple[str, int]]) -> None:
    """Make these tokens, texts and ids, the ones that the saved tokenizer.json puts before a text (plait does so
    itself)."""
    from tokenizers import processors

    if named:
        # A name in the template cannot have spaces or colons, which a token may have.
        names = [f"prefix_{n}" if set(token) & set(" :$") else token for n, (token, _) in enumerate(named)]
        text = " ".join(f"{name}:0" for name in names)
        special = [{"id": name, "ids": [id], "tokens": [token]} for name, (token, id) in zip(names, named, strict=True)]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{text} $A:0", pair=f"{text} $A:0 $B:1", special_tokens=special
        )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {"default": metadata.get("tokenizer.chat_template")}
    templates["tool_use"] = metadata.get("tokenizer.chat_template.tool_use")
    return {name: text for name, text in templates.items() if isinstance(text, str) and text}
