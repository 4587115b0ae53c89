"""What a model is verified on: built-in texts of several kinds, one of them longer than the model's windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from plait.errors import UsageError
from plait.model.config import ModelConfig

TEXTS = {
    "prose": "The lighthouse keeper climbed the stairs every evening, counting them aloud, and every evening he found",
    "code": "def parse_date(text: str) -> tuple[int, int, int]:\n    year, month, day = text.split('-')\n    return",
    "numbers": "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67,",
    "languages": "Guten Morgen! Où est la gare ? 東京は今日も雨です。 Привет, мир. ¿Qué hora es? 🙂 สวัสดี",
}
LONG_TOKENS = 320  # the long prompt, where no window asks for more
LONGEST_TOKENS = 1100  # beyond this a check would take minutes on a CPU


@dataclass(frozen=True)
class Prompt:
    """name: for the report. token_ids: at least one."""

    name: str
    token_ids: list[int]


def given_prompts(texts: Sequence[str], tokenizer: Any, config: ModelConfig) -> list[Prompt]:
    """Prompts from the user's texts. Raises UsageError where they cannot be tokenised or do not fit."""
    if tokenizer is None:
        raise UsageError("this model has no tokenizer that plait can read: leave --prompt and --prompts out")
    prompts = [Prompt(f"prompt {i}", tokenizer.encode(text)) for i, text in enumerate(texts, 1)]
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) <= config.max_positions:
            raise UsageError(
                f"{prompt.name} has {len(prompt.token_ids)} tokens; the model takes 1 to {config.max_positions}"
            )
    return prompts


def built_in_prompts(tokenizer: Any, config: ModelConfig, length: int | None) -> list[Prompt]:
    """The built-in texts, and a long one of `length` tokens (default: past the model's windows, within reason).

    Without a tokenizer, the same number of prompts of evenly drawn token ids.
    """
    limit = max(config.max_positions - 1, 1)
    longest = min(length or long_enough(config), limit)
    if tokenizer is None:
        draw = np.random.default_rng(0)
        lengths = [min(n, limit) for n in (5, 23, 64, longest)]
        return [Prompt(f"random ids {n}", draw.integers(0, config.vocab_size, n).tolist()) for n in lengths]
    prompts = [Prompt(name, tokenizer.encode(text)[:limit]) for name, text in TEXTS.items()]
    return [*prompts, Prompt("long", _long(tokenizer, longest))]


def long_enough(config: ModelConfig) -> int:
    """Tokens that reach past every window that is not too long for that."""
    windows = [layer.attention.window for layer in config.layers]
    reachable = [w + 64 for w in windows if w + 64 <= LONGEST_TOKENS]
    return max([LONG_TOKENS, *reachable])


def unreached_windows(config: ModelConfig, prompts: Sequence[Prompt]) -> list[int]:
    """Windows that are at least as long as every prompt: nothing that was run shows whether they are right."""
    longest = max(len(p.token_ids) for p in prompts)
    return sorted({w for layer in config.layers if (w := layer.attention.window) >= longest})


def _long(tokenizer: Any, length: int) -> list[int]:
    """The built-in texts again and again under changing numbers, so that the text does not merely repeat itself."""
    ids: list[int] = []
    for text in _numbered():
        ids += tokenizer.encode(text, add_bos=not ids)
        if len(ids) >= length:
            return ids[:length]
    raise AssertionError("the numbered texts do not end")


def _numbered() -> Iterator[str]:
    for number, text in enumerate(cycle(TEXTS.values()), 1):
        yield f"\n\n{number}. {text}"
