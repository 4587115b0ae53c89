"""Translation: `<lang> source <sep> target <eos>`, where the target and eos are learnt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from plait.text.tokenizer import Tokenizer
from plait.training.data.config import DataConfig, SourceConfig
from plait.training.data.examples import Sequences
from plait.training.data.files import Row
from plait.training.data.items import Content, Item, column
from plait.training.data.task import Encoded, Task, fit
from plait.training.data.tokenizers import SEP_TEXT, control_id, eos_id, tag_text


class Pair(NamedTuple):
    """tag, back: the languages that stand at the beginning in either direction."""

    source: str
    target: str
    tag: str
    back: str


def _tag(source: SourceConfig) -> str:
    return source.tag or source.pair[1]


def _is_english(language: str) -> bool:
    return language.lower().replace("_", "-").split("-")[0] in ("en", "eng", "english")


def _read(source: SourceConfig) -> Callable[[Row], Content | None]:
    # The split follows the English side, so that a text has one side across languages; without one, the source's.
    languages = source.pair
    leads = 1 if _is_english(languages[1]) and not _is_english(languages[0]) else 0
    tag, back = _tag(source), languages[0]

    def read(row: Row) -> Content | None:
        texts = (column(row, source.source), column(row, source.target))
        if not texts[0].strip() or not texts[1].strip():
            return None
        return Content(Pair(*texts, tag, back), texts, texts[leads])

    return read


def _tags(config: DataConfig) -> tuple[str, ...]:
    forward = [_tag(source) for source in config.sources]
    backward = [source.pair[0] for source in config.sources] if config.both_directions else []
    return tuple(dict.fromkeys(forward + backward))


def sequence(tag: int, source: Sequence[int], sep: int, target: Sequence[int], eos: int, language: int) -> Encoded:
    """The tokens of a pair, those from the target's first on learnt."""
    before = [tag, *source, sep]
    return Encoded([*before, *target, eos], [0] * len(before) + [1] * (len(target) + 1), language)


def _encode(items: Sequence[Item], tokenizer: Tokenizer, config: DataConfig, tally: Counter[str]) -> Iterator[Encoded]:
    sep, eos = control_id(tokenizer, SEP_TEXT), eos_id(tokenizer)
    tags = {name: (control_id(tokenizer, tag_text(name)), place) for place, name in enumerate(_tags(config))}
    ids = tokenizer.encode_plain_batch([text for item in items for text in item.content[:2]])
    for item, source, target in zip(items, ids[::2], ids[1::2], strict=True):
        pair = item.content
        tag, language = tags[pair.tag]
        yield from fit(sequence(tag, source, sep, target, eos, language), item, config, tally)
        if config.both_directions and pair.back != pair.tag:
            tag, language = tags[pair.back]
            yield from fit(sequence(tag, target, sep, source, eos, language), item, config, tally)


TRANSLATION = Task(
    columns=lambda source: (source.source, source.target),
    read=_read,
    texts=lambda item: item.content[:2],
    encode=_encode,
    view=lambda store, config: Sequences(store, roles=True),
    tags=_tags,
    fields=lambda config: {
        "context": config.context,
        "too_long": config.too_long,
        "both_directions": config.both_directions,
    },
)
