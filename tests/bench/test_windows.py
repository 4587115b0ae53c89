"""`plait bench windows`: what the block manager hands out is what arithmetic, done here by hand, says."""

from __future__ import annotations

import json

import pytest

from plait.bench.windows import MODELS, fill_pool, measure_windows
from plait.cli.main import main
from plait.errors import CapacityError, UsageError
from plait.memory.layout import CacheLayout
from plait.model.known_models import known_models
from plait.model.kv_arithmetic import CacheFacts, requests_that_fit
from plait.ops.spec import LayerCache

GIB = 1 << 30
CHUNK = 512
FACTS = {facts.model: facts for facts in known_models()}


def by_hand(layout: CacheLayout, context: int, pool_bytes: int, recycling: bool) -> int:
    """Requests that fit one after the other: each needs its peak while it is prefilled, and keeps what is visible."""
    usable = pool_bytes // layout.block_bytes - 1  # one block is the null block

    def held(end: int, done: int) -> int:
        """Blocks of a sequence with room for `end` tokens of which `done` have been computed."""
        total = 0
        for group in layout.groups:
            window = group.cache.window if recycling else 0
            oldest = max(done - window + 1, 0) if window else 0  # the first key that the next token sees
            total += -(-end // group.block_tokens) - oldest // group.block_tokens
        return total

    step = min(CHUNK, context) if recycling else context
    ends = [*range(step, context, step), context]
    peak = max(held(end, done) for done, end in zip([0, *ends[:-1]], ends, strict=True))
    kept = held(context, context)
    return 0 if peak > usable else 1 + (usable - peak) // kept


@pytest.mark.parametrize("recycling", [True, False])
@pytest.mark.parametrize("model", [*MODELS, "Gemma-3-4B", "Llama-3.1-8B", "DeepSeek-V3"])
@pytest.mark.parametrize(("context", "gib"), [(32_768, 16), (5000, 3)])
def test_allocation_is_what_arithmetic_says(model: str, recycling: bool, context: int, gib: int) -> None:
    requests, recycled, layout = fill_pool(FACTS[model], context, gib * GIB, recycling)
    assert requests == by_hand(layout, context, gib * GIB, recycling) > 0
    promised = requests_that_fit(FACTS[model], gib * GIB, context, recycling)
    # Admission counts on every request being at its peak at once.
    assert promised <= requests if recycling else promised == requests
    assert (recycled > 0) == (recycling and FACTS[model].window is not None)


def test_a_case_on_paper() -> None:
    """One full layer and three of window 64, rows of 2 numbers: a block is 16 tokens of one layer, 64 bytes."""
    full, windowed = LayerCache(1, 1, 1), LayerCache(1, 1, 1, window=64)
    facts = CacheFacts("toy", (full, windowed, windowed, windowed), 8)
    context, pool = 16_000, 4001 * 64
    without, _, layout = fill_pool(facts, context, pool, recycling=False)
    assert layout.block_bytes % 64 == 0
    # 16,000 tokens are 1,000 blocks a layer: 4,000 for all four, which is the pool without its null block.
    assert without == 1
    # With recycling a windowed layer keeps ceil(63 / 16) = 4 blocks, or 5 where the window begins inside one.
    requests, _, _ = fill_pool(facts, context, pool, recycling=True)
    assert requests == 3


def test_the_report_has_both_and_the_gain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "windows", "--context", "8192", "--pool", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in report["models"]] == list(MODELS)
    assert (report["context_tokens"], report["pool_bytes"]) == (8192, 8 * GIB)
    for row in report["models"]:
        with_, without = row["with_recycling"], row["without_recycling"]
        assert row["gain"] == round(with_["requests"] / without["requests"], 2) > 1
        assert without["recycled_blocks"] == 0 < with_["recycled_blocks"]
    assert main(["bench", "windows", "--context", "8192", "--pool", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = report["models"][0]
    assert lines[0].startswith("requests of 8,192 tokens that fit in 8 GiB")
    assert lines[4].split()[:3] == ["Mistral-7B-v0.1", "4096", str(first["with_recycling"]["requests"])]


def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="not one of the models"):
        measure_windows(models=["nobody"])
    with pytest.raises(CapacityError, match="has 0 blocks of"):
        measure_windows(pool_bytes=1000)
    for words, message in [
        (["--rounds", "2"], "--rounds would be ignored"),
        (["--context", "1,2"], "takes one number"),
    ]:
        assert main(["bench", "windows", *words]) == 2
        assert message in capsys.readouterr().err
