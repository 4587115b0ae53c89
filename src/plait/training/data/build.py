"""From a configuration to data: read, split, check, train a tokenizer, tokenise, or find all that in the cache."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from plait import __version__, cachefile
from plait.errors import ConfigError, DataError
from plait.text.tokenizer import Tokenizer
from plait.training.data import datasets_hub, tokens
from plait.training.data.chat import CHAT
from plait.training.data.config import DataConfig, SourceConfig
from plait.training.data.examples import Joined, TokenStore
from plait.training.data.files import Row, find_files, read_rows
from plait.training.data.items import Item, items_of
from plait.training.data.language import LANGUAGE
from plait.training.data.report import DataReport, SourceReport
from plait.training.data.splits import SIDES, drop_leaks
from plait.training.data.task import Task
from plait.training.data.tokenizers import from_json, given_tokenizer, identity, pad_id, train_tokenizer
from plait.training.data.translation import TRANSLATION

# A new task is an entry here, and its name in DataConfig.task.
TASKS: dict[str, Task] = {"language": LANGUAGE, "translation": TRANSLATION, "chat": CHAT}

# Raised when what is stored changes its meaning.
_VERSION = 2
_BLOCK_CHARS = 4_000_000

# (what is being done, how much is done, of how much; 0: unknown)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Data:
    """What a run trains and is judged on.

    train, valid, test: examples; the last two may be empty. stores: by side, the token sequences of each source, whole
    documents or pairs. languages: names by `Batch.languages`. pad_id: what stands at padding.
    fingerprint: differs where contents of files, tokenizer or configuration differ in what examples depend on; a run
    that goes on with another one does not go on with the same batches.
    """

    tokenizer: Tokenizer
    train: Joined
    valid: Joined
    test: Joined
    stores: Mapping[str, Sequence[TokenStore]]
    languages: tuple[str, ...]
    pad_id: int
    report: DataReport
    fingerprint: str


def build_data(config: DataConfig, tokenizer: Tokenizer | None = None, progress: Progress | None = None) -> Data:
    """The data of a configuration.

    tokenizer: of a checkpoint or of the run that goes on; without one the configuration's is loaded, or one is trained
    on the training split.

    Raises DataError for bad rows, leaks between the sides, or nothing to train on; UsageError for files that are not
    there; ConfigError and TokenizerError for a configuration that cannot be carried out.
    """
    if not config.sources:
        raise ConfigError("data.sources is empty: name at least one file to train on")
    builder = _Builder(config, progress or (lambda stage, done, total: None))
    if tokenizer is None:
        tokenizer = given_tokenizer(config.tokenizer) if config.tokenizer.path else builder.trained_tokenizer()
    return builder.data(tokenizer)


class _Builder:
    def __init__(self, config: DataConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._task = TASKS[config.task]
        self._datasets = {k: datasets_hub.load(s) for k, s in enumerate(config.sources) if s.dataset}
        self._tags = self._task.tags(config)

    @cached_property
    def _key(self) -> dict[str, Any]:
        """What the items of all sources depend on."""
        contents = []
        for k, source in enumerate(self._config.sources):
            self._progress("looking at files", k, len(self._config.sources))
            asked = asdict(source)
            # Files count by what is in them, wherever they lie.
            paths = [asked.pop("path"), asked.pop("target_path"), (asked["join"] or {}).pop("path", "")]
            del asked["weight"]
            digests = [[name, _digest_of_file(file)] for path in paths if path for name, file in _named_files(path)]
            loaded = datasets_hub.fingerprint(self._datasets[k]) if k in self._datasets else []
            contents.append([asked, digests, loaded])
        return {"version": _VERSION, "plait": __version__, "sources": contents, "splits": asdict(self._config.splits)}

    @cached_property
    def _items(self) -> tuple[list[list[Item]], list[Counter[str]]]:
        """Items by source, those that stand on two sides gone, and tallies of what was left out."""
        every: list[Item] = []
        ends, tallies = [0], []
        for k, source in enumerate(self._config.sources):
            tally: Counter[str] = Counter()
            read, columns = self._task.read(source), self._task.columns(source)
            for item in items_of(self._config, source, self._rows(k, source), read, columns, tally):
                every.append(item)
                if not len(every) % 10_000:
                    self._progress(f"reading {source.name}", len(every) - ends[-1], 0)
            ends.append(len(every))
            tallies.append(tally)
        self._progress("comparing the sides of the split", 0, 1)
        kept = {id(item) for item in drop_leaks(every, self._config.splits.on_leak)}
        parts = [every[a:b] for a, b in pairwise(ends)]
        for tally, part in zip(tallies, parts, strict=True):
            tally["on two sides"] = sum(id(item) not in kept for item in part)
        return [[item for item in part if id(item) in kept] for part in parts], tallies

    def _rows(self, k: int, source: SourceConfig) -> Iterator[Row]:
        return datasets_hub.rows(source, self._datasets[k]) if k in self._datasets else read_rows(source)

    def trained_tokenizer(self) -> Tokenizer:
        import tokenizers

        wanted = self._config.tokenizer
        key = {
            "kind": "tokenizer",
            "items": self._key,
            "task": self._config.task,
            "tags": self._tags,
            "size": [wanted.vocab_size, wanted.max_chars],
            "tokenizers": tokenizers.__version__,
        }
        name = self._entry("tokenizer", key)
        entry = cachefile.read(name, _plain(key)) if cachefile.directory() is not None else None
        if entry is not None:
            return from_json(bytes(entry.arrays["json"]).decode())
        assert self._items  # reads the rows, and says so, before the training begins
        self._progress("training the tokenizer", 0, 1)
        tokenizer = train_tokenizer(self._training_texts(wanted.max_chars), wanted.vocab_size, self._tags)
        data = np.frombuffer(json.dumps(tokenizer.specification()).encode(), np.uint8)
        try:
            with cachefile.Writer(name, data.nbytes) as writer:
                writer.add("json", data)
                writer.commit(_plain(key), {})
        except OSError as error:
            if cachefile.directory() is not None:
                cachefile.say_unwritten(error)
        return tokenizer

    def _training_texts(self, max_chars: int) -> Iterator[str]:
        chars = 0
        for item in (item for part in self._items[0] for item in part if item.side == "train"):
            for text in self._task.texts(item):
                if max_chars and chars >= max_chars:
                    return
                chars += len(text)
                yield text

    def data(self, tokenizer: Tokenizer) -> Data:
        identified = hashlib.blake2b(identity(tokenizer).encode(), digest_size=32).hexdigest()
        key = {
            "kind": "tokens",
            "items": self._key,
            "task": self._config.task,
            "fields": self._task.fields(self._config),
            "tags": self._tags,
            "tokenizer": identified,
        }
        name = self._entry("tokens", key)
        found = tokens.read(name, _plain(key), tokenizer.vocab_size)
        if found is None:
            stores, report = self._tokenise(tokenizer)
            tokens.write(name, _plain(key), stores, {"report": asdict(report)})
        else:
            stores, facts = found
            report = DataReport.from_facts(facts["report"])
        by_side = {side: [stores[f"{k}.{side}"] for k in range(len(self._config.sources))] for side in SIDES}
        if not sum(map(len, by_side["train"])):
            raise DataError(f"there is nothing to train on: {'; '.join(report.lines())}")
        weights = [source.weight for source in self._config.sources]
        joined = {
            side: Joined([self._task.view(store, self._config) for store in by_side[side]], weights) for side in SIDES
        }
        return Data(
            tokenizer,
            **joined,
            stores=by_side,
            languages=self._tags,
            pad_id=pad_id(tokenizer),
            report=report,
            fingerprint=_digest(key),
        )

    def _tokenise(self, tokenizer: Tokenizer) -> tuple[dict[str, TokenStore], DataReport]:
        parts, tallies = self._items
        total, done = sum(map(len, parts)), 0
        stores, sources = {}, []
        for k, (part, tally) in enumerate(zip(parts, tallies, strict=True)):
            text_bytes = {}
            for side in SIDES:
                builder = tokens.StoreBuilder(tokenizer.vocab_size)
                text_bytes[side] = 0
                for block in self._blocks(item for item in part if item.side == side):
                    self._progress("tokenising", done, total)
                    for sequence in self._task.encode(block, tokenizer, self._config, tally):
                        builder.add(sequence)
                    text_bytes[side] += sum(len(text.encode()) for item in block for text in self._task.texts(item))
                    done += len(block)
                stores[f"{k}.{side}"] = builder.build()
            sources.append(self._report(k, tally, stores, text_bytes))
        return stores, DataReport(tuple(sources), tokenizer.vocab_size)

    def _blocks(self, items: Iterable[Item]) -> Iterator[list[Item]]:
        """Items in order, in blocks of some million characters: what `tokenizers` encodes at once."""
        block: list[Item] = []
        chars = 0
        for item in items:
            block.append(item)
            chars += sum(map(len, item.texts))
            if chars >= _BLOCK_CHARS:
                yield block
                block, chars = [], 0
        if block:
            yield block

    def _report(
        self, k: int, tally: Counter[str], stores: Mapping[str, TokenStore], text_bytes: Mapping[str, int]
    ) -> SourceReport:
        own = {side: stores[f"{k}.{side}"] for side in SIDES}
        return SourceReport(
            name=self._config.sources[k].name,
            rows=tally.pop("rows", 0),
            left_out={reason: count for reason, count in tally.items() if count and reason != "used"},
            sequences={side: len(store) for side, store in own.items()},
            tokens={side: len(store.tokens) for side, store in own.items()},
            text_bytes=dict(text_bytes),
        )

    def _entry(self, kind: str, key: Mapping[str, Any]) -> str:
        first = self._config.sources[0]
        return cachefile.entry_name(kind, Path(first.name), _digest(key))


def _named_files(path: str) -> list[tuple[str, Path]]:
    """Files with their names, in a directory from there on."""
    place, files = Path(path).expanduser(), find_files(path)
    return [(file.relative_to(place).as_posix() if place.is_dir() else file.name, file) for file in files]


def _plain(key: Mapping[str, Any]) -> Any:
    """The key as it comes back from JSON."""
    return json.loads(json.dumps(key))


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest_of_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
