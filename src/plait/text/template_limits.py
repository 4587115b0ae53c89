"""What a chat template may spend: steps, seconds, and the size of what it builds.

A template cannot be stopped from outside in a thread, so it is metered from inside: each operation that can repeat
spends a step, and each operation that can build something large says its size beforehand. No operation is larger than
MAX_VALUE_SIZE, so the time between two looks at the clock is short.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

MAX_VALUE_SIZE = 1 << 23
MAX_TOTAL_SIZE = 1 << 28
MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0
MAX_INTEGER_BITS = 4096
MAX_NUMBER_CHARS = 512  # of a text that becomes a number; in base 36 they are fewer bits than the above
MAX_ROUNDING_DIGITS = 512
# A one-character string in a list takes the memory of several characters of a text.
_ITEM_SIZE = 8
_LONG_NEEDLE = 64
_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SEARCHES = (
    *("find", "rfind", "index", "rindex", "count", "replace"),
    *("split", "rsplit", "partition", "rpartition", "strip", "lstrip", "rstrip"),
)
_ITERATING_FILTERS = (
    *("list", "sort", "unique", "batch", "slice", "groupby", "join"),
    *("min", "max", "map", "select", "reject", "title", "wordcount"),
)
MAX_TIME_PATTERN = 256
_PADDED_TIME = re.compile(r"%[-_0^#+]*[1-9]")
_NUMBER = re.compile(r"\d+")


class TemplateLimitError(TemplateError):
    """The template would take too long or build too much."""


class Budget(threading.local):
    """What the rendering in this thread may still spend."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._steps = MAX_STEPS
        self._total = MAX_TOTAL_SIZE
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, size: int = 0) -> None:
        """One step that builds `size` characters or items."""
        self._steps -= 1
        self._total -= size
        if size > MAX_VALUE_SIZE or self._total < 0:
            raise TemplateLimitError("it builds too large a value")
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise TemplateLimitError("it takes too long to render")


def size_of(value: Any) -> int:
    """Characters of a string, bits of an integer, and for a collection what its whole text would take, roughly.

    A list that holds another one twice counts it twice, because printing or comparing it goes through it twice.
    """
    if isinstance(value, list | tuple | dict):
        return _expanded_size(value, {})
    if isinstance(value, int):
        return value.bit_length()
    if isinstance(value, bytes | bytearray | memoryview):
        raise TemplateLimitError("it uses bytes")
    return len(value) if isinstance(value, str | range) else 1


def _expanded_size(value: Any, known: dict[int, int]) -> int:
    if not isinstance(value, list | tuple | dict):
        return size_of(value)
    if id(value) not in known:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_expanded_size(item, known) for item in items)
    return known[id(value)]


def binary_size(operator: str, left: Any, right: Any) -> int:
    """The size of `left operator right`, or more. Raises for integers of more than MAX_INTEGER_BITS."""
    if isinstance(left, int) and isinstance(right, int):
        sizes = size_of(left), size_of(right)
        bits = {"**": sizes[0] * max(right, 0), "*": sum(sizes)}.get(operator, 0)
        if max(bits, *sizes) > MAX_INTEGER_BITS:  # division takes quadratic time
            raise TemplateLimitError("it computes too large an integer")
        return 0
    if operator == "*":
        count = left if isinstance(left, int) else right
        repeated = right if isinstance(left, int) else left
        return size_of(repeated) * max(count, 0) if isinstance(count, int) else 0
    if operator == "+":
        return size_of(left) + size_of(right)
    if operator == "%" and isinstance(left, str):
        return format_size(left, right if isinstance(right, tuple) else (right,))
    return 0


def string_method_size(text: str, name: str, arguments: Sequence[Any]) -> int:
    """The size of `text.name(*arguments)`, or more."""
    searched = search_size(text, arguments) if name in _SEARCHES else 0
    if searched > MAX_VALUE_SIZE:
        return searched
    if name in ("format", "format_map"):
        return format_size(text, arguments)
    if name == "join" and arguments:
        return join_size(text, arguments[0])
    if name == "replace" and len(arguments) >= 2:
        return replace_size(text, arguments[0], arguments[1])
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        return len(text) + _sum_of_integers(arguments) * (1 + text.count("\t"))
    if name in ("split", "rsplit", "splitlines"):
        return searched + len(text) + _ITEM_SIZE * _count_pieces(text, name, arguments)
    if name == "translate" and arguments:
        values = arguments[0].values() if isinstance(arguments[0], Mapping) else arguments
        return len(text) * (1 + max(map(size_of, values), default=0))
    return len(text) + searched


def search_size(text: str, arguments: Sequence[Any]) -> int:
    """What looking for a long text costs, from the end, and in strip: the product of lengths."""
    longest = max((len(argument) for argument in arguments if isinstance(argument, str)), default=0)
    return len(text) * longest // _LONG_NEEDLE if longest > _LONG_NEEDLE else 0


def _count_pieces(text: str, name: str, arguments: Sequence[Any]) -> int:
    separators = next((argument for argument in arguments if isinstance(argument, str)), None)
    if name == "splitlines":
        count = sum(map(text.count, _LINE_ENDS))
    else:
        count = text.count(separators) if separators else sum(map(text.count, _SPACES))
    limits = [argument for argument in arguments if isinstance(argument, int) and argument >= 0]
    return 1 + (min(count, *limits) if limits and name != "splitlines" else count)


def filter_size(name: str, value: Any, arguments: Sequence[Any]) -> int:
    """The size of `value | name(*arguments)`, or more; what an iterator gives is not known beforehand."""
    if name in ("int", "float") and isinstance(value, str) and len(value) > MAX_NUMBER_CHARS:
        raise TemplateLimitError(f"it reads a number of more than {MAX_NUMBER_CHARS} characters")
    if name == "round" and _sum_of_integers(arguments) > MAX_ROUNDING_DIGITS:
        raise TemplateLimitError(f"it rounds to more than {MAX_ROUNDING_DIGITS} digits")
    if name in ("replace", "trim") and search_size(str(value), arguments) > MAX_VALUE_SIZE:
        return search_size(str(value), arguments)
    if isinstance(value, str) and name in _ITERATING_FILTERS and _ITEM_SIZE * len(value) > MAX_VALUE_SIZE:
        return _ITEM_SIZE * len(value)
    if name == "format":
        return format_size(str(value), arguments)
    if name == "replace" and len(arguments) >= 2:
        return replace_size(str(value), arguments[0], arguments[1])
    if name == "join":
        return join_size(str(arguments[0]) if arguments else "", value)
    if name == "wordwrap" and isinstance(value, str):
        return wordwrap_size(value, arguments)
    if name in ("center", "indent", "batch", "slice", "truncate", "tojson", "round"):
        lines = value.count("\n") + 1 if isinstance(value, str) else size_of(value)
        others = sum(size_of(argument) for argument in arguments if not isinstance(argument, int))
        return size_of(value) + lines * (_sum_of_integers(arguments) + others)
    if name == "sum" and any(not isinstance(argument, int | float | str) for argument in arguments):
        raise TemplateLimitError("it sums what are not numbers")  # adding up lists takes quadratic time
    return size_of(value)


def format_size(pattern: str, arguments: Sequence[Any]) -> int:
    """Widths stand in the pattern, or are arguments themselves; every field could name the largest argument."""
    values: list[Any] = []
    for argument in arguments:
        values.extend(argument.values() if isinstance(argument, Mapping) else [argument])
    fields = pattern.count("%") + pattern.count("{")
    widths = sum(int(number[:10]) for number in _NUMBER.findall(pattern))
    largest = max((size_of(value) + 64 for value in values), default=0)
    takes_widths = "*" in pattern or pattern.count("{") > 1
    return len(pattern) + widths + fields * (largest + (_sum_of_integers(values) if takes_widths else 0))


def join_size(separator: str, items: Any) -> int:
    if not isinstance(items, str | list | tuple | dict):
        return 0
    return len(separator) * len(items) + size_of(items)


def check_time_pattern(pattern: Any) -> None:
    """What strftime may be asked: no width, which the C library pads to without bound. Raises TemplateLimitError."""
    if not isinstance(pattern, str) or len(pattern) > MAX_TIME_PATTERN:
        raise TemplateLimitError(f"strftime_now takes text of at most {MAX_TIME_PATTERN} characters")
    if _PADDED_TIME.search(pattern):
        raise TemplateLimitError("strftime_now takes no widths")


def replace_size(text: str, old: Any, new: Any) -> int:
    if not (isinstance(old, str) and isinstance(new, str)):
        return len(text)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def wordwrap_size(text: str, arguments: Sequence[Any]) -> int:
    """Each character may become a line of its own, with the longest argument after it.

    A word is cut from its rest piece by piece: quadratic time in its length, though it moves bytes by the block.
    """
    separator = max((len(argument) for argument in arguments if isinstance(argument, str)), default=1)
    longest = max(map(len, text.split()), default=0)
    return len(text) * (1 + separator) + len(text) * longest // 64


def _sum_of_integers(values: Iterable[Any]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))
