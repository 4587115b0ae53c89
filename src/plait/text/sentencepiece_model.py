"""Reads a SentencePiece model (`tokenizer.model`), a Protocol Buffers message, without trusting it.

Of the message only what encoding depends on is kept: pieces with scores and types, the kind of model, byte fallback,
and the normaliser's rules. The wire format is read directly: every length is compared with the bytes that remain, and
nothing is allocated but what the file itself holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from plait.errors import TokenizerError
from plait.jsonfile import check_readable
from plait.text.charsmap import check_charsmap
from plait.weights.sources import probable_cause

MAX_TOKENIZER_BYTES = 512 << 20
# Real ones have at most some hundred; splitting longer ones in every way would take very long.
MAX_TOKEN_CHARS = 1024

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_KINDS = {UNIGRAM: "unigram", BPE: "BPE", 3: "word", 4: "char"}
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT = struct.Struct("<f")


@dataclass(frozen=True)
class SentencePieceModel:
    """What a model file says. pieces, scores, types: by id. unk_id: the piece for what is unknown. bos_id, eos_id,
    pad_id: control pieces, None where the model has none. charsmap: the precompiled normalisation, perhaps empty."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: int
    unk_id: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    byte_fallback: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @property
    def kind_name(self) -> str:
        return _KINDS[self.kind]

    @property
    def control_pieces(self) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.types, strict=True) if kind == CONTROL]


def read_model(path: Path) -> SentencePieceModel:
    """The model in a file. Raises TokenizerError, naming the file, for what is damaged or not supported."""
    check_readable(path, TokenizerError, MAX_TOKENIZER_BYTES)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_model(data, str(path))


def parse_model(data: bytes, path: str) -> SentencePieceModel:
    """As `read_model`, of the file's bytes."""
    cause = "" if data[:1] == b"\n" else probable_cause(data[:256])
    if cause or not data:
        raise TokenizerError(f"{path} is not a SentencePiece model: {cause or 'it is empty'}")
    if _looks_like_ranks(data):
        raise TokenizerError(
            f"{path} is not a SentencePiece model: it is a list of tiktoken ranks, without the expression that cuts"
            " text into words; save a tokenizer.json with transformers' AutoTokenizer"
        )
    message = _Message(data, path)
    return _check(message.read(), path)


def _looks_like_ranks(data: bytes) -> bool:
    word, _, rank = data[:200].partition(b"\n")[0].partition(b" ")
    return rank.strip().isdigit() and word.rstrip(b"=").replace(b"+", b"").replace(b"/", b"").isalnum()


@dataclass
class _Raw:
    pieces: list[bytes] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    trainer: dict[int, Any] = field(default_factory=dict)
    normalizer: dict[int, Any] = field(default_factory=dict)


class _Message:
    """The fields of a message of the wire format, each checked against the end of what holds it."""

    def __init__(self, data: bytes, path: str) -> None:
        self._data = data
        self._path = path

    def read(self) -> _Raw:
        raw = _Raw()
        for number, wire, start, end in self._fields(0, len(self._data)):
            if wire != _BYTES or number not in (1, 2, 3):
                continue
            if number == 1:
                self._piece(raw, start, end)
            else:
                self._spec(raw.trainer if number == 2 else raw.normalizer, start, end)
        return raw

    def _fields(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(number, wire type, start, end) of every field; a varint is given by its place."""
        while start < stop:
            tag, begin = self._varint(start, stop)
            wire = tag & 7
            if wire == _BYTES:
                length, begin = self._varint(begin, stop)
                end = begin + length
            elif wire == _VARINT:
                end = self._varint(begin, stop)[1]
            elif wire in (_FIXED64, _FIXED32):
                end = begin + (8 if wire == _FIXED64 else 4)
            else:
                raise self._damaged(f"a field of the unknown wire type {wire}", start)
            if tag >> 3 == 0:
                raise self._damaged("a field with number 0", start)
            if end > stop:
                raise self._damaged(f"a field of {end - begin} bytes where {stop - begin} remain", start)
            yield tag >> 3, wire, begin, end
            start = end

    def _varint(self, start: int, stop: int) -> tuple[int, int]:
        value = 0
        for shift, position in enumerate(range(start, min(start + 10, stop))):
            byte = self._data[position]
            value |= (byte & 0x7F) << 7 * shift
            if byte < 0x80:
                return value, position + 1
        raise self._damaged("a number without an end", start)

    def _piece(self, raw: _Raw, start: int, end: int) -> None:
        data = self._data
        # A hundred thousand pieces are written alike: text of under 128 bytes, score, and a type where not normal.
        size = data[start + 1] if end - start > 2 and data[start] == 0x0A else 0x80
        at = start + 2 + size
        if size < 0x80 and at + 5 <= end and data[at] == 0x15:
            kind = NORMAL if at + 5 == end else data[at + 6] if at + 7 == end and data[at + 5] == 0x18 else 0x80
            if kind < 0x80:
                raw.pieces.append(data[start + 2 : at])
                raw.scores.append(_FLOAT.unpack_from(data, at + 1)[0])
                raw.types.append(kind)
                return
        fields: dict[int, Any] = {}
        self._spec(fields, start, end)
        text, score, kind = fields.get(1, b""), fields.get(2, 0.0), fields.get(3, NORMAL)
        if not (isinstance(text, bytes) and isinstance(score, float) and isinstance(kind, int)):
            raise self._damaged("a piece whose fields have the wrong types", start)
        raw.pieces.append(text)
        raw.scores.append(score)
        raw.types.append(kind)

    def _spec(self, fields: dict[int, Any], start: int, end: int) -> None:
        """Values by field number: int, float or bytes; of one that is given twice the last."""
        for number, wire, begin, stop in self._fields(start, end):
            if wire == _VARINT:
                value = self._varint(begin, stop)[0]
                fields[number] = value - (1 << 64) if value >> 63 else value
            elif wire == _FIXED32:
                fields[number] = _FLOAT.unpack_from(self._data, begin)[0]
            elif wire == _BYTES:
                fields[number] = self._data[begin:stop]

    def _damaged(self, what: str, at: int) -> TokenizerError:
        return TokenizerError(f"{self._path} is not a SentencePiece model, or damaged: {what} at byte {at}")


# Field numbers of TrainerSpec and NormalizerSpec (sentencepiece_model.proto).
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK, _BOS, _EOS, _PAD = 3, 24, 35, 41, 42, 43
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE = 2, 3, 4, 5


def _check(raw: _Raw, path: str) -> SentencePieceModel:
    trainer, normalizer = raw.trainer, raw.normalizer
    kind = _number(trainer, _MODEL_TYPE, UNIGRAM, path)
    if kind not in (UNIGRAM, BPE):
        raise TokenizerError(f"{path} is a model of kind {_KINDS.get(kind, kind)!r}; supported are unigram and BPE")
    if _number(trainer, _SUFFIX, 0, path) or not _number(normalizer, _ESCAPE, 1, path):
        name = "treat_whitespace_as_suffix" if _number(trainer, _SUFFIX, 0, path) else "escape_whitespaces: false"
        raise TokenizerError(f"{path} has {name}, which is not supported")
    pieces = _texts(raw.pieces, path)
    _check_scores_and_types(raw, path)
    unknown = [id for id, type in enumerate(raw.types) if type == UNKNOWN]
    if len(unknown) != 1:
        raise TokenizerError(f"{path} has {len(unknown)} pieces for unknown text; there must be one")
    byte_fallback = bool(_number(trainer, _BYTE_FALLBACK, 0, path))
    _check_bytes(pieces, raw.types, byte_fallback, path)
    charsmap = normalizer.get(_CHARSMAP, b"")
    check_charsmap(charsmap, path)

    def control(number: int, default: int) -> int | None:
        id = _number(trainer, number, default, path)
        return id if 0 <= id < len(pieces) and raw.types[id] == CONTROL else None

    return SentencePieceModel(
        pieces,
        raw.scores,
        raw.types,
        kind,
        unknown[0],
        control(_BOS, 1),
        control(_EOS, 2),
        control(_PAD, -1),
        byte_fallback,
        charsmap,
        bool(_number(normalizer, _DUMMY_PREFIX, 1, path)),
        bool(_number(normalizer, _EXTRA_SPACES, 1, path)),
    )


def _number(fields: dict[int, Any], number: int, default: int, path: str) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise TokenizerError(f"{path} is damaged: field {number} of its settings is not a number")
    return value


def _texts(raw: list[bytes], path: str) -> list[str]:
    if not raw:
        raise TokenizerError(f"{path} is not a SentencePiece model: it has no pieces")
    pieces = []
    for id, piece in enumerate(raw):
        try:
            pieces.append(piece.decode())
        except UnicodeDecodeError:
            raise TokenizerError(f"{path} is damaged: piece {id} is not UTF-8") from None
    check_texts(pieces, path)
    return pieces


def check_texts(pieces: list[str], path: str) -> None:
    """Raises TokenizerError for a token that is empty or too long, or that is there twice."""
    for id, piece in enumerate(pieces):
        if not piece or len(piece) > MAX_TOKEN_CHARS:
            what = f"has {len(piece)} characters (at most {MAX_TOKEN_CHARS})" if piece else "is empty"
            raise TokenizerError(f"{path} is damaged: token {id} {what}")
    if len(set(pieces)) != len(pieces):
        seen: set[str] = set()
        for id, piece in enumerate(pieces):
            if piece in seen:
                raise TokenizerError(f"{path} is damaged: token {id} is {piece!r:.80}, which was there before")
            seen.add(piece)


def _check_scores_and_types(raw: _Raw, path: str) -> None:
    for id, (score, kind) in enumerate(zip(raw.scores, raw.types, strict=True)):
        if not isfinite(score):
            raise TokenizerError(f"{path} is damaged: the score of piece {id} is {score}")
        if not NORMAL <= kind <= BYTE:
            raise TokenizerError(f"{path} is damaged: piece {id} has the unknown type {kind}")
    if NORMAL not in raw.types:
        raise TokenizerError(f"{path} has no piece for ordinary text")


def _check_bytes(pieces: list[str], types: list[int], byte_fallback: bool, path: str) -> None:
    found = {piece for piece, kind in zip(pieces, types, strict=True) if kind == BYTE}
    if byte_fallback and found != set(BYTE_PIECES):
        raise TokenizerError(f"{path} falls back to bytes, but has {len(found)} of the 256 byte pieces")
    if found and not byte_fallback:
        raise TokenizerError(f"{path} has {len(found)} byte pieces, but does not fall back to bytes")
