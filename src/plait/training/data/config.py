"""The `data:` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from plait.errors import ConfigError


@dataclass(frozen=True)
class JoinConfig:
    """A table (TSV with a header) whose columns are added to each row: those of its row with the same `on`."""

    path: str = ""
    on: str = ""


@dataclass(frozen=True)
class SourceConfig:
    """Where rows come from, which of them count, and which columns say what.

    path: a file, a directory of .txt files, or a pattern (`*.jsonl`); .xz, .gz, .bz2 and .zst are read as what they
        hold. target_path: the other file of a parallel pair, line by line. dataset, subset: a name of the `datasets`
        library, in place of a path.
    format: by the file's name where "auto": .jsonl, .tsv, .csv, .parquet, any other is text; with `target_path`, lines.
    per: what is one document of a plain text: the file, a line, or a section (paragraphs, gathered to 2,000 letters).
        auto: files of a directory or pattern, sections of a single file.
    weight: how often an example of this source is seen in an epoch; 0.5: each half in turn.
    text: the column of language modelling. source, target: those of translation; their names are the languages where
        `languages` (source, target) is not given. tag: the language that stands at the beginning, default the target's.
    messages: the column of chats. answer: a column to add as the last message, the assistant's.
    id: the column of the source id, from which the split follows. auto: the first of source_id, source, id that there
        is, else the text itself.
    split_column: wins over the source id, where rows have it. split: puts the whole source on one side.
    where, unless: columns and the values that a row must have, or must not have: one, or a list; `*` and `?` as in file
        names. min_words, max_words: of the text, in translation of the English side. max_rows: the first so many.
    """

    path: str = ""
    target_path: str = ""
    dataset: str = ""
    subset: str = ""
    format: Literal["auto", "jsonl", "text", "tsv", "csv", "lines", "parquet"] = "auto"
    per: Literal["auto", "file", "line", "section"] = "auto"
    weight: float = 1.0
    text: str = "text"
    source: str = "source"
    target: str = "target"
    languages: tuple[str, ...] = ()
    tag: str = ""
    messages: str = "messages"
    answer: str = ""
    id: str = "auto"
    split_column: str = "split"
    split: Literal["auto", "train", "valid", "test"] = "auto"
    where: dict[str, Any] = field(default_factory=dict)
    unless: dict[str, Any] = field(default_factory=dict)
    join: JoinConfig | None = None
    min_words: int = 0
    max_words: int = 0
    max_rows: int = 0

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.dataset):
            raise ConfigError("data.sources: each source needs a path or a dataset (one of the two)")
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"data.sources: weight of {self.name} must be above 0, not {self.weight}")
        if self.languages and len(self.languages) != 2:
            raise ConfigError(f"data.sources: languages of {self.name} are two, of source and target")
        if self.join is not None and not (self.join.path and self.join.on):
            raise ConfigError(f"data.sources: join of {self.name} needs a path and the column that it is joined on")
        if self.target_path and self.format not in ("auto", "lines"):
            raise ConfigError(f"data.sources: target_path of {self.name} goes with format lines, not {self.format}")
        if self.format == "lines" and not self.target_path:
            raise ConfigError(f"data.sources: format lines of {self.name} needs a target_path")
        for name in ("min_words", "max_words", "max_rows"):
            if getattr(self, name) < 0:
                raise ConfigError(f"data.sources: {name} of {self.name} must not be negative")

    @property
    def name(self) -> str:
        return self.path or self.dataset

    @property
    def pair(self) -> tuple[str, str]:
        """The languages of source and target."""
        return (self.languages[0], self.languages[1]) if self.languages else (self.source, self.target)


@dataclass(frozen=True)
class SplitConfig:
    """How rows without a split column are split: by a hash of the source id, into these shares; the rest trains.

    on_leak: what to do about a text that stands on two sides. error: stop, and name it. drop: keep it where it is held
    out (test before valid before train), drop it elsewhere, and count.
    """

    valid: float = 0.05
    test: float = 0.05
    on_leak: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        if not (min(self.valid, self.test) >= 0 and self.valid + self.test < 1):
            raise ConfigError(
                f"data.splits: valid and test are shares that leave something to train on, "
                f"not {self.valid} and {self.test}"
            )


@dataclass(frozen=True)
class TokenizerConfig:
    """path: a model whose tokenizer is used (a directory or a GGUF file). Without one, a byte-level BPE of `vocab_size`
    entries is trained on the training split: on the first `max_chars` characters of it, 0 for all."""

    path: str = ""
    vocab_size: int = 24_000
    max_chars: int = 0


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    task: language (plain documents), translation (pairs), chat (messages).
    context: the most tokens of an example; of language modelling, its window.
    documents: joined: windows run over the borders of documents. apart: documents of a window do not see each other.
    both_directions: each pair is also trained from target to source, if their languages differ.
    packed: several chats share a row of `context` tokens without seeing each other.
    too_long: what to do with a pair or a chat of more than `context` tokens: drop or truncate (both counted), or error.
    """

    task: Literal["language", "translation", "chat"] = "language"
    sources: tuple[SourceConfig, ...] = ()
    splits: SplitConfig = SplitConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    context: int = 256
    documents: Literal["joined", "apart"] = "joined"
    both_directions: bool = False
    packed: bool = False
    too_long: Literal["drop", "truncate", "error"] = "drop"

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ConfigError(f"data.context must be at least 2, not {self.context}")
