"""Language modelling: documents, joined with eos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from plait.text.tokenizer import Tokenizer
from plait.training.data.config import DataConfig, SourceConfig
from plait.training.data.examples import Windows
from plait.training.data.files import Row
from plait.training.data.items import Content, Item, column
from plait.training.data.task import Encoded, Task
from plait.training.data.tokenizers import eos_id


def _read(source: SourceConfig) -> Callable[[Row], Content | None]:
    def read(row: Row) -> Content | None:
        text = column(row, source.text)
        return Content(text, (text,), text) if text.strip() else None

    return read


def _encode(items: Sequence[Item], tokenizer: Tokenizer, config: DataConfig, tally: Counter[str]) -> Iterator[Encoded]:
    """Each document's tokens, eos behind them, and before them what the tokenizer puts before a prompt (BOS)."""
    prefix, eos = list(tokenizer.prefix_ids), eos_id(tokenizer)
    for ids in tokenizer.encode_plain_batch([item.content for item in items]):
        yield Encoded([*prefix, *ids, eos])


LANGUAGE = Task(
    columns=lambda source: (source.text,),
    read=_read,
    texts=lambda item: (item.content,),
    encode=_encode,
    view=lambda store, config: Windows(store, config.context, config.documents == "apart"),
    tags=lambda config: (),
    fields=lambda config: {},
)
