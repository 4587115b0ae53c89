"""What became of the rows of each source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SourceReport:
    """rows: read. left_out: how many of them were not used, or not as they are, by reason. sequences, tokens:
    documents, pairs or chats, and their tokens, by side of the split. text_bytes: of their texts in UTF-8, by side."""

    name: str
    rows: int
    left_out: Mapping[str, int]
    sequences: Mapping[str, int]
    tokens: Mapping[str, int]
    text_bytes: Mapping[str, int]


@dataclass(frozen=True)
class DataReport:
    """By source, and the size of the vocabulary."""

    sources: tuple[SourceReport, ...]
    vocab_size: int

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> DataReport:
        """From what `dataclasses.asdict` made of one."""
        return cls(tuple(SourceReport(**source) for source in facts["sources"]), facts["vocab_size"])

    def lines(self) -> Iterator[str]:
        """A line for each source."""
        for source in self.sources:
            kept = ", ".join(
                f"{side} {source.sequences[side]:,} ({source.tokens[side]:,} tokens)" for side in source.sequences
            )
            gone = "".join(f", {count:,} {reason}" for reason, count in source.left_out.items())
            yield f"{source.name}: {source.rows:,} rows{gone}; {kept}"
