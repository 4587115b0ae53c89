"""Which modules the lists of a quantisation block mean."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Modules:
    """A list of entries: names of modules, parts of such names between dots, or regular expressions ("re:...")."""

    def __init__(self, entries: Iterable[str]) -> None:
        entries = tuple(entries)
        self._names = {entry for entry in entries if not entry.startswith("re:")}
        self._patterns = [(entry, re.compile(entry[3:])) for entry in entries if entry.startswith("re:")]

    def entry_for(self, module: str) -> str | None:
        """The entry that means a module; None where none does."""
        if self._names:
            parts = module.split(".")
            for start in range(len(parts)):
                for stop in range(len(parts), start, -1):
                    name = ".".join(parts[start:stop])
                    if name in self._names:
                        return name
        return next((entry for entry, pattern in self._patterns if pattern.match(module)), None)

    def has(self, entry: str) -> bool:
        """Whether this very entry is in the list."""
        return entry in self._names
