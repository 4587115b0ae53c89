"""Stop strings, matched on the text as it arrives."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import RequestError


class StopMatcher:
    """Passes text on until one of the stop strings is complete.

    The stop whose last character comes first in the text wins; of those that end at the same character, the longest.
    Only a suffix that may still grow into a stop is held back, so that no part of a stop is ever given out.

    Args:
        stops: the stop strings. None stands for no stops; an empty string raises RequestError (field "stop").
        include_stop: give the stop string out with the text before it.
    """

    def __init__(self, stops: str | Sequence[str] | None, include_stop: bool = False) -> None:
        stops = [stops] if isinstance(stops, str) else list(stops or ())
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("stop must hold non-empty strings; leave it out for no stop strings", field="stop")
        # Longest first: of two stops that end together the longer one starts earlier, so less text leaks out.
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include_stop = include_stop
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be given out now and the stop that has hit, or None. After a hit nothing comes out."""
        if self.hit is not None or not self._stops:
            return ("" if self.hit is not None else text), self.hit
        window = self._held + text
        end, stop = self._earliest_end(window)
        if stop is not None:
            self.hit, self._held = stop, ""
            return window[: end if self._include_stop else end - len(stop)], stop
        keep = self._possible_prefix(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def flush(self) -> str:
        """The text that was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _earliest_end(self, window: str) -> tuple[int, str | None]:
        best_end, best = len(window) + 1, None
        for stop in self._stops:
            start = window.find(stop, 0, best_end)
            if start >= 0 and start + len(stop) < best_end:
                best_end, best = start + len(stop), stop
        return best_end, best

    def _possible_prefix(self, window: str) -> int:
        """The length of the longest suffix of `window` that is a proper prefix of a stop."""
        longest = min(len(window), len(self._stops[0]) - 1)
        for length in range(longest, 0, -1):
            suffix = window[len(window) - length :]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
