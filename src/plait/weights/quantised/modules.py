"""Which modules the lists of a quantisation block mean."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Modules:
    """A list of entries: names of modules, parts of such names between dots, or regular expressions ("re:...")."""

    def __init__(self, entries: Iterable[str]) -> None:
        entries = tuple(entries)
        self._names = {entry for entry in entries if not entry.startswith("re:")}
        # First part of a name -> how many parts such names have: a checkpoint has tens of thousands of modules.
        self._lengths: dict[str, set[int]] = {}
        for name in self._names:
            first, *others = name.split(".")
            self._lengths.setdefault(first, set()).add(1 + len(others))
        self._patterns = [(entry, re.compile(entry[3:])) for entry in entries if entry.startswith("re:")]

    def entry_for(self, module: str) -> str | None:
        """The entry that means a module; None where none does."""
        parts = module.split(".") if self._names else []
        for start, first in enumerate(parts):
            for length in self._lengths.get(first, ()):
                name = ".".join(parts[start : start + length])
                if name in self._names:
                    return name
        return next((entry for entry, pattern in self._patterns if pattern.match(module)), None)

    def has(self, entry: str) -> bool:
        """Whether this very entry is in the list."""
        return entry in self._names
