"""The `tokenizers` object that encodes as a SentencePiece model does.

What has no counterpart there is spelled with what there is:

- BPE with scores becomes a list of merges (`merges_from_scores`).
- A user-defined piece is never split and never merged with its neighbours. Under BPE text is cut around such pieces,
  and each is a word that the model takes whole (`ignore_merges`). Under unigram it gets SentencePiece's own score.
- Pieces that no text may become (control, unknown, byte, unused) get a score that no path chooses, or a cut inside the
  one word that the model would take whole.
- Added tokens are found in the raw text, and every piece of text between them begins with the dummy prefix; with
  `legacy: false` only the very first does, and not if it begins with a space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plait.errors import TokenizerError
from plait.text.backend_errors import backend_errors
from plait.text.configured_tokens import Settings, add_configured_tokens
from plait.text.gguf_tokenizer import MergeStore, stored_merges
from plait.text.sentencepiece_model import (
    BPE,
    BYTE,
    BYTE_PIECES,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
)

_SPACE = "\u2581"
# Below any sum of real scores, and far from where the sums would lose digits.
_NEVER = -1e6
# SentencePiece's score for a user-defined piece: so much for each byte but one (found by experiment with 0.2.3).
_USER_DEFINED_BYTE = 0.1


def build_backend(
    model: SentencePieceModel,
    settings: Settings,
    *,
    where: str,
    legacy: bool = True,
    add_prefix_space: bool = True,
    store: MergeStore | None = None,
) -> Any:
    """A `tokenizers.Tokenizer` with the model's pieces and the settings' tokens behind them.

    where: the model's file, for errors. legacy: as in transformers, see above. add_prefix_space: False leaves the dummy
    prefix out whatever the model says. store: keeps the merges of a BPE model. Raises TokenizerError.
    """
    from tokenizers import Tokenizer

    prefixed = model.add_dummy_prefix and add_prefix_space
    merges = _merges(model, store) if model.kind == BPE else []
    model = _renamed(model, settings, where)
    backend = Tokenizer(_bpe(model, merges, where) if model.kind == BPE else _unigram(model, where))
    backend.normalizer = _normalizer(model, prefixed and legacy)
    steps = _pre_tokenizers(model, first_prefixed=prefixed and not legacy)
    if steps is not None:
        backend.pre_tokenizer = steps
    backend.decoder = _decoder(model, strip=prefixed or model.remove_extra_whitespaces)
    add_configured_tokens(backend, settings, [*model.control_pieces, model.pieces[model.unk_id]], in_raw_text=True)
    return backend


def _renamed(model: SentencePieceModel, settings: Settings, where: str) -> SentencePieceModel:
    """The model with the texts that added tokens give to its ids: unused pieces become the marks of a chat so."""
    pieces, types = list(model.pieces), list(model.types)
    ids = {piece: id for id, piece in enumerate(pieces)}
    for id, token in settings.described.items():
        if id >= len(pieces) or pieces[id] == token.content:
            continue
        if token.content in ids or types[id] == BYTE:
            raise TokenizerError(
                f"token {id} is {pieces[id]!r:.80} in {where}, but {token.content!r:.80} was added as it"
            )
        pieces[id] = token.content
        types[id] = types[id] if types[id] != NORMAL else UNUSED
    return replace(model, pieces=pieces, types=types)


def _merges(model: SentencePieceModel, store: MergeStore | None) -> list[tuple[str, str]]:
    """The merges of the file's own pieces: what the store keeps depends on that file alone."""
    # Only ordinary pieces are joined and come of joining.
    types = [kind if kind == NORMAL else CONTROL for kind in model.types]
    return stored_merges(model.pieces, types, model.scores, store)


def _bpe(model: SentencePieceModel, merges: Sequence[tuple[str, str]], where: str) -> Any:
    from tokenizers import models

    ordinary = {piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == NORMAL}
    with backend_errors(f"{where} cannot be used"):
        return models.BPE(
            vocab={piece: id for id, piece in enumerate(model.pieces)},
            # Those of a piece that has got another text are gone.
            merges=[pair for pair in merges if ordinary.issuperset((*pair, pair[0] + pair[1]))],
            unk_token=model.pieces[model.unk_id],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=USER_DEFINED in model.types,
        )


def _unigram(model: SentencePieceModel, where: str) -> Any:
    from tokenizers import models

    scored: list[tuple[str, float]] = []
    for piece, score, kind in zip(model.pieces, model.scores, model.types, strict=True):
        if kind == USER_DEFINED:
            score = _USER_DEFINED_BYTE * (len(piece.encode()) - 1)
        scored.append((piece, score if kind in (NORMAL, USER_DEFINED) else _NEVER))
    with backend_errors(f"{where} cannot be used"):
        return models.Unigram(scored, unk_id=model.unk_id, byte_fallback=model.byte_fallback)


def _normalizer(model: SentencePieceModel, prefixed: bool) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", _SPACE))
    if prefixed:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence(steps)


def _pre_tokenizers(model: SentencePieceModel, first_prefixed: bool) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    if first_prefixed:
        steps.append(pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False))
    whole = [piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == USER_DEFINED]
    if whole and model.kind == BPE:
        longest_first = sorted(whole, key=len, reverse=True)
        steps.append(pre_tokenizers.Split(Regex("|".join(map(_literal, longest_first))), "isolated"))
        ordinary = {p for p, kind in zip(model.pieces, model.types, strict=True) if kind in (NORMAL, USER_DEFINED)}
        reserved = [text for text in model.pieces if text not in ordinary and text not in BYTE_PIECES and len(text) > 1]
        never_whole = [f"{_literal(text[0])}(?={_literal(text[1:])}\\z)" for text in reserved]
        if model.byte_fallback:
            never_whole.append(r"<(?=0x[0-9A-F]{2}>\z)")
        if never_whole:
            steps.append(pre_tokenizers.Split(Regex(f"\\A(?:{'|'.join(never_whole)})"), "isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _literal(text: str) -> str:
    """An expression that matches exactly this text."""
    return re.sub("[^0-9A-Za-z]", lambda match: f"\\x{{{ord(match[0]):X}}}", text)


def _decoder(model: SentencePieceModel, strip: bool) -> Any:
    from tokenizers import decoders

    fallback = [decoders.ByteFallback()] if model.byte_fallback else []
    start = [decoders.Strip(" ", 1, 0)] if strip else []
    return decoders.Sequence([decoders.Replace(_SPACE, " "), *fallback, decoders.Fuse(), *start])
