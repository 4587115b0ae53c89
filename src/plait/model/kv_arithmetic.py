"""What a context costs: bytes of keys and values per token, and how many requests fit in a given memory. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import UsageError
from plait.memory.layout import make_layout
from plait.model.config import ModelConfig
from plait.ops.spec import LayerCache

BF16_BYTES = 2
DEFAULT_CONTEXT = 32_768
# What one step adds to a sequence at most; it bounds the blocks of a windowed layer.
CHUNK_TOKENS = 512


@dataclass(frozen=True)
class CacheFacts:
    """A model as the cache sees it.

    caches: per layer. full_numbers_per_token: numbers per token if every query head kept a key and a value of its own.
    parameters: of the whole model, None where unknown.
    """

    model: str
    caches: tuple[LayerCache, ...]
    full_numbers_per_token: int
    parameters: int | None = None

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one more token costs while no window is full."""
        return sum(cache.numbers_per_token for cache in self.caches)

    @property
    def window(self) -> int | None:
        """The narrowest sliding window, None without one."""
        return min((cache.window for cache in self.caches if cache.window), default=None)


def facts_of(model: str, config: ModelConfig) -> CacheFacts:
    """The facts of a configuration that plait can carry out."""
    attentions = [layer.attention for layer in config.layers]
    full = sum(a.num_heads * (a.key_width + a.value_width) for a in attentions)
    return CacheFacts(model, tuple(config.caches()), full, config.param_counts()["total"])


def summary(facts: CacheFacts, context_tokens: int = DEFAULT_CONTEXT) -> dict[str, Any]:
    """One row of `plait models`: bf16, no recycling of out-of-window blocks.

    Bytes per token = sum over layers of kv heads * (key width + value width) * 2 (a latent layer: (r + rope) * 2).
    """
    per_token = facts.numbers_per_token * BF16_BYTES
    row = {
        "model": facts.model,
        "kv_KiB_per_token": round(per_token / 2**10, 1),
        "GiB_for_32k_tokens": round(per_token * DEFAULT_CONTEXT / 2**30, 2),
        "saving_vs_full_mha": f"{facts.full_numbers_per_token / facts.numbers_per_token:.1f}x",
        "sliding_window": facts.window,
    }
    if context_tokens != DEFAULT_CONTEXT:
        row["context_tokens"] = context_tokens
        row["GiB_for_context"] = round(per_token * context_tokens / 2**30, 2)
    return row


def requests_that_fit(
    facts: CacheFacts,
    memory_bytes: int,
    context_tokens: int,
    recycling: bool,
    bytes_per_number: int = BF16_BYTES,
    chunk_tokens: int = CHUNK_TOKENS,
) -> int:
    """Requests of `context_tokens` tokens whose blocks fit in `memory_bytes` at the same time.

    Counted as the engine counts: whole blocks, the null block, padded groups. recycling: blocks whose tokens have left
    their layer's window are reused; without it every layer keeps the whole context.
    """
    chunk = min(chunk_tokens, context_tokens) if recycling else context_tokens
    layout = make_layout(facts.caches, bytes_per_number, context_tokens, chunk)
    usable = memory_bytes // layout.block_bytes - 1
    return max(usable, 0) // layout.blocks_per_sequence(context_tokens, chunk if recycling else None)


def fit_columns(
    facts: CacheFacts, memory_bytes: int, context_tokens: int, subtract_weights: bool = False
) -> dict[str, Any]:
    """What `--memory` adds to a row; subtract_weights takes the bf16 weights off the memory first."""
    left = memory_bytes
    row: dict[str, Any] = {"memory_GiB": round(memory_bytes / 2**30, 2), "context_tokens": context_tokens}
    if subtract_weights:
        if facts.parameters is None:
            raise UsageError(f"{facts.model}: the number of parameters is unknown, so weights cannot be subtracted")
        weights = facts.parameters * BF16_BYTES
        row["weights_GiB"] = round(weights / 2**30, 2)
        left = max(memory_bytes - weights, 0)
    row["requests_with_recycling"] = requests_that_fit(facts, left, context_tokens, recycling=True)
    row["requests_without_recycling"] = requests_that_fit(facts, left, context_tokens, recycling=False)
    return row


def table(
    models: Sequence[CacheFacts],
    context_tokens: int = DEFAULT_CONTEXT,
    memory_bytes: int | None = None,
    subtract_weights: bool = False,
) -> list[dict[str, Any]]:
    """The rows of `plait models`, in the order given."""
    return [
        summary(facts, context_tokens)
        | ({} if memory_bytes is None else fit_columns(facts, memory_bytes, context_tokens, subtract_weights))
        for facts in models
    ]
