"""What recycling of out-of-window blocks is worth: requests of one context that fit in one pool, with it and without.

No weights and no arithmetic: the engine's own block manager hands out the blocks of every request, step by step as its
scheduler would have it (a prompt in chunks), until no further request fits. Beside that stands the arithmetic of
`plait models --memory`, which is what admission promises.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.errors import CapacityError, UsageError
from plait.kernels.machine import read_cpu_model
from plait.memory.blocks import BlockManager, SequenceBlocks
from plait.memory.layout import CacheLayout, make_layout
from plait.model.known_models import known_models
from plait.model.kv_arithmetic import BF16_BYTES, CHUNK_TOKENS, DEFAULT_CONTEXT, CacheFacts, requests_that_fit

MODELS = ("Mistral-7B-v0.1", "Gemma-3-12B", "gpt-oss-20b")
DEFAULT_POOL_GIB = 40
# Bounds the time of a run: a pool holds no more requests than blocks.
MAX_BLOCKS = 1 << 22


def measure_windows(
    context_tokens: int = DEFAULT_CONTEXT, pool_bytes: int = DEFAULT_POOL_GIB << 30, models: Sequence[str] = MODELS
) -> dict[str, Any]:
    """The report of `plait bench windows`: a row per model. Keys and values are bf16.

    Raises UsageError for a model that `plait models` does not list, and CapacityError for a pool without room.
    """
    facts = {known.model: known for known in known_models()}
    for name in models:
        if name not in facts:
            raise UsageError(f"{name}: not one of the models that `plait models` lists")
    return {
        "bench": "windows",
        "cpu": read_cpu_model(),
        "context_tokens": context_tokens,
        "pool_bytes": pool_bytes,
        "chunk_tokens": min(CHUNK_TOKENS, context_tokens),
        "models": [_row(facts[name], context_tokens, pool_bytes) for name in models],
    }


def _row(facts: CacheFacts, context_tokens: int, pool_bytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"model": facts.model, "window": facts.window}
    for recycling in (True, False):
        start = time.perf_counter()
        requests, recycled, layout = fill_pool(facts, context_tokens, pool_bytes, recycling)
        row["with_recycling" if recycling else "without_recycling"] = {
            "requests": requests,
            "arithmetic": requests_that_fit(facts, pool_bytes, context_tokens, recycling),
            "recycled_blocks": recycled,
            "pool_blocks": pool_bytes // layout.block_bytes,
            "block_bytes": layout.block_bytes,
            "seconds": round(time.perf_counter() - start, 3),
        }
    without = row["without_recycling"]["requests"]
    row["gain"] = round(row["with_recycling"]["requests"] / without, 2) if without else None
    return row


def fill_pool(facts: CacheFacts, context_tokens: int, pool_bytes: int, recycling: bool) -> tuple[int, int, CacheLayout]:
    """(requests of `context_tokens` tokens that the pool holds at once, blocks recycled meanwhile, the layout).

    recycling False: nothing is committed, so that no block ever leaves a window.
    """
    chunk = min(CHUNK_TOKENS, context_tokens)
    layout = make_layout(facts.caches, BF16_BYTES, context_tokens, chunk if recycling else context_tokens)
    blocks = pool_bytes // layout.block_bytes
    if not 2 <= blocks <= MAX_BLOCKS:
        raise CapacityError(
            f"{facts.model}: the pool of {pool_bytes} bytes has {blocks} blocks of {layout.block_bytes} bytes;"
            f" give it at least 2 and at most {MAX_BLOCKS}",
            field="pool",
        )
    manager = BlockManager(layout, blocks, prefix_caching=False, chunk_tokens=chunk if recycling else context_tokens)
    tokens = np.zeros(context_tokens, np.int32)
    held: list[SequenceBlocks] = []
    while (sequence := _prefill(manager, tokens, chunk if recycling else None)) is not None:
        held.append(sequence)
    manager.check_integrity(held)
    return len(held), manager.stats.recycled_blocks, layout


def _prefill(manager: BlockManager, tokens: np.ndarray, chunk: int | None) -> SequenceBlocks | None:
    """A sequence that holds what a request of all these tokens needs, or None, with nothing taken, where it has no
    room. chunk: tokens of a step, whose keys and values then stay; None: all at once, and none of them ever leaves."""
    sequence = manager.new_sequence(tokens[:1])
    ends = [*range(chunk, len(tokens), chunk), len(tokens)] if chunk else [len(tokens)]
    for end in ends:
        if not manager.allocate(sequence, end):
            manager.free(sequence)
            return None
        if chunk:
            manager.commit(sequence, tokens, end)
    return sequence


def text_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    pool = report["pool_bytes"] / 2**30
    lines = [
        f"requests of {report['context_tokens']:,} tokens that fit in {pool:g} GiB at once, keys and values in bf16,",
        "by allocation in the block manager (in brackets: the arithmetic that admission goes by)",
        "",
        f"{'model':<18}{'window':>8}{'with recycling':>18}{'without':>14}{'gain':>8}",
    ]
    for row in report["models"]:
        cells = [row[name] for name in ("with_recycling", "without_recycling")]
        with_, without = (f"{cell['requests']:,} ({cell['arithmetic']:,})" for cell in cells)
        gain = "-" if row["gain"] is None else f"{row['gain']}x"
        lines.append(f"{row['model']:<18}{row['window'] or '-':>8}{with_:>18}{without:>14}{gain:>8}")
    return lines
