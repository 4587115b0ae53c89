"""Translations of a split by the model that was trained for them, and their BLEU and chrF2 by language."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.decoding.beam import Beams, beam_search
from plait.decoding.bleu import SAMPLES, bleu, chrf2, tokenizer_of
from plait.decoding.generation import generate
from plait.decoding.scoring import batches_by_length
from plait.errors import DataError
from plait.model.decoder import Decoder
from plait.text.tokenizer import Tokenizer
from plait.training.data.build import Data
from plait.training.data.examples import TokenStore
from plait.training.data.tokenizers import eos_id

MAX_NEW_TOKENS = 200


@dataclass(frozen=True)
class Pair:
    """`<lang> source <sep>` as ids, and the target that stands behind it, as ids without eos."""

    language: str
    prompt: list[int]
    reference: list[int]


@dataclass(frozen=True)
class Translation:
    """A pair's translation as text; hypothesis and reference are NFC by the tokenizer's own rule."""

    language: str
    source: str
    hypothesis: str
    reference: str
    tokens: int
    ended: bool


def pairs_of(data: Data, side: str, limit: int | None = None) -> tuple[list[Pair], int]:
    """The pairs of a side (all, or `limit` of them, evenly spaced), and how many of those taken were left out because
    their target was cut off. Raises DataError where the side has none."""
    stores = data.stores[side]
    places = [(store, i) for store in stores for i in range(len(store))]
    if limit is not None and limit < len(places):
        places = [places[k * len(places) // limit] for k in range(limit)]
    end = eos_id(data.tokenizer)
    found = [pair for store, i in places if (pair := _pair(store, i, data.languages, end)) is not None]
    if not found:
        raise DataError(f"the {side} split has no pairs to translate: give data.splits a share for it")
    return found, len(places) - len(found)


def _pair(store: TokenStore, index: int, languages: Sequence[str], end: int) -> Pair | None:
    tokens, learnt = store.sequence(index)
    assert learnt is not None and store.languages is not None
    if tokens[-1] != end:
        return None
    first = int(learnt.argmax())
    language = languages[int(store.languages[index])]
    return Pair(language, tokens[:first].tolist(), tokens[first:-1].tolist())


def translate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    pairs: Sequence[Pair],
    *,
    batch_tokens: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
    width: int = 1,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Translation]:
    """Translations in the order of the pairs, greedy or the best of `width` beams (`pool`, length penalty 1).

    Rows of like length share a batch whose rows, times the width, times their final length stay within batch_tokens; a
    row's room ends with the model's positions.
    """
    ends = [eos_id(tokenizer)]
    found: dict[int, Translation] = {}
    for rows, room in _batches(decoder, pairs, batch_tokens // width, max_new_tokens):
        prompts = [pairs[i].prompt for i in rows]
        if width > 1:
            best = [row[0] for row in beam_search(decoder, prompts, room, Beams(width), eos_ids=ends)]
            result = [(hypothesis.tokens, hypothesis.ended) for hypothesis in best]
        else:
            greedy = generate(decoder, prompts, room, eos_ids=ends)
            result = list(zip(greedy.tokens, greedy.ended, strict=True))
        for i, (tokens, ended) in zip(rows, result, strict=True):
            pair = pairs[i]
            found[i] = Translation(
                pair.language,
                tokenizer.decode(pair.prompt),
                tokenizer.decode(tokens),
                tokenizer.decode(pair.reference),
                len(tokens),
                ended,
            )
        advance(len(rows))
    return [found[i] for i in range(len(pairs))]


def _batches(
    decoder: Decoder, pairs: Sequence[Pair], batch_tokens: int, max_new_tokens: int
) -> list[tuple[list[int], int]]:
    """(places of pairs, new tokens that they may have). Rows with less room than others never share their batch: what
    a row becomes does not depend on who is beside it."""
    by_room: dict[int, list[int]] = {}
    for i, pair in enumerate(pairs):
        room = min(max_new_tokens, decoder.config.max_positions - len(pair.prompt))
        if room > 0:
            by_room.setdefault(room, []).append(i)
        else:
            raise DataError(
                f"a source of {len(pair.prompt)} tokens leaves no room in {decoder.config.max_positions} positions"
            )
    found = []
    for room, places in by_room.items():
        lengths = [len(pairs[i].prompt) + room for i in places]
        found += [([places[k] for k in group], room) for group in batches_by_length(lengths, batch_tokens)]
    return found


def scores(
    translations: Sequence[Translation], tokenizers: Mapping[str, str] | None = None, samples: int = SAMPLES
) -> dict[str, dict[str, Any]]:
    """By target language: pairs, BLEU and chrF2 (`Score.to_json`), tokens per translation, share that ended.

    tokenizers: language -> sacrebleu's tokenizer, in place of the language's own.
    """
    found = {}
    for language in dict.fromkeys(t.language for t in translations):
        own = [t for t in translations if t.language == language]
        hypotheses, references = [t.hypothesis for t in own], [t.reference for t in own]
        tokenizer = (tokenizers or {}).get(language) or tokenizer_of(language)
        found[language] = {
            "pairs": len(own),
            "bleu": bleu(hypotheses, references, tokenizer, samples).to_json(),
            "chrf2": chrf2(hypotheses, references, samples).to_json(),
            "mean_length": sum(t.tokens for t in own) / len(own),
            "ended": sum(t.ended for t in own) / len(own),
        }
    return found
