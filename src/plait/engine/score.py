"""Log-probabilities of long texts: a window slides over the tokens, every token is scored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import exp, log
from typing import TYPE_CHECKING, Any

from plait.errors import RequestError

if TYPE_CHECKING:
    from plait.engine.score_forward import Forward
    from plait.text.tokenizer import Tokenizer

MAX_WINDOW = 2048


@dataclass
class TextScore:
    """A scored text. token_logprobs: natural logarithms, None for a token that has nothing before it.

    num_bytes: of the scored tokens' text in UTF-8, so the first token's do not count where it is not scored.
    """

    name: str
    token_ids: list[int]
    token_logprobs: list[float | None]
    num_bytes: int

    @property
    def num_scored(self) -> int:
        return sum(value is not None for value in self.token_logprobs)

    @property
    def nll(self) -> float:
        """Sum of -log p over the scored tokens, in nats."""
        return -sum(value for value in self.token_logprobs if value is not None)

    def to_json(self) -> dict[str, Any]:
        return {"file": self.name, "tokens": len(self.token_ids), **figures(self.nll, self.num_scored, self.num_bytes)}


def figures(nll: float, num_scored: int, num_bytes: int) -> dict[str, Any]:
    """perplexity = exp(nll / tokens); bits per byte = nll / ln 2 / bytes."""
    mean = nll / num_scored
    return {
        "scored_tokens": num_scored,
        "bytes": num_bytes,
        "nll": nll,
        "nll_per_token": mean,
        "perplexity": exp(mean) if mean < 700 else float("inf"),
        "bits_per_byte": nll / log(2) / num_bytes if num_bytes else None,
    }


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) are fed; those from `first` on are scored."""

    begin: int
    first: int
    end: int


def window_size(window: int | None, max_positions: int) -> int:
    """Tokens that a forward sees: what was asked for, or the model's positions, at most MAX_WINDOW."""
    return window or min(max_positions, MAX_WINDOW)


def windows(num_tokens: int, size: int, stride: int, bos: bool) -> Iterator[Window]:
    """Windows that score every token once; without BOS all but token 0, which has nothing before it.

    A window feeds at most `size` tokens, BOS included, and moves on by `stride`: beyond the first window a token sees
    at least size - stride of the tokens before it.
    """
    room = size - bos
    done = 0 if bos else 1
    end = min(room + 1, num_tokens)
    while done < num_tokens:
        # The last token is only a target: it need not be fed.
        yield Window(max(0, end - 1 - room), done, end)
        done, end = end, min(end + stride, num_tokens)


@dataclass
class Scorer:
    """Scores texts with a forward, a window at a time.

    window: tokens that a forward sees (default: the model's positions, at most 2,048); stride: how far it moves on
    (default: half of the window). Where the tokenizer adds a BOS token, every window begins with it.
    Raises RequestError for sizes that cannot work.
    """

    forward: Forward
    tokenizer: Tokenizer
    window: int | None = None
    stride: int | None = None
    advance: Callable[[int], None] = field(default=lambda count: None)

    def __post_init__(self) -> None:
        positions = self.forward.max_positions
        self.size = window_size(self.window, positions)
        self.step = self.stride or max(self.size // 2, 1)
        self.bos = self.tokenizer.bos_token_id if self.tokenizer.add_bos_token else None
        if not 2 <= self.size <= positions:
            raise RequestError(f"window {self.size} must be 2 to {positions}, the model's positions", field="window")
        if not 1 <= self.step <= self.size - (self.bos is not None):
            raise RequestError(f"stride {self.step} must be at least 1 and at most the window's tokens", field="stride")

    def encode(self, text: str) -> list[int]:
        """Ids of a text without BOS; the text of special tokens in it is ordinary text."""
        return self.tokenizer.encode_plain(text)

    def score(self, text: str, name: str = "text") -> TextScore:
        """Score one text. Raises RequestError where nothing can be scored."""
        ids = self.encode(text)
        begins_with_bos = self.bos is not None
        if len(ids) < 1 + (not begins_with_bos):
            raise RequestError(f"{name}: {len(ids)} tokens, nothing to score", field="text")
        logprobs: list[float | None] = [] if begins_with_bos else [None]
        for window in windows(len(ids), self.size, self.step, begins_with_bos):
            logprobs += self._score_window(ids, window)
            self.advance(window.end - window.first)
        num_bytes = len(text.encode()) - (0 if begins_with_bos else len(self.tokenizer.token_bytes(ids[0])))
        return TextScore(name, ids, logprobs, num_bytes)

    def _score_window(self, ids: list[int], window: Window) -> list[float]:
        prefix = [] if self.bos is None else [self.bos]
        return self.forward.logprobs(prefix + ids[window.begin : window.end - 1], ids[window.first : window.end])
