"""Decode, prefill and batch: tokens per second of ours and of the peers, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plait.bench.costs import Costs, measure_costs
from plait.bench.limits import read_rate
from plait.bench.report import OURS, make_row, start_report
from plait.bench.sides import BatchTiming, OurSide, PeerModel, TheirSide, Timing, open_sides
from plait.bench.summary import Summary, alternate, common_prefix, percentile
from plait.bench.text import load_text_ids, make_prompts

Advance = Callable[[], None]
# The bandwidth is measured with a buffer that no cache holds, however small the model.
_MIN_READ_BYTES = 100 << 20


def measure_decode(
    path: Path,
    peers: list[PeerModel],
    *,
    contexts: Sequence[int] = (128,),
    new_tokens: int = 64,
    rounds: int = 5,
    threads: int,
    text: str | None = None,
    options: dict[str, Any] | None = None,
    advance: Advance = lambda: None,
) -> dict[str, Any]:
    """One greedy request: tokens/s after a prompt of each length. advance: once per run and side."""
    ids, prefix = load_text_ids(path, text)
    prompts = {context: make_prompts(ids, prefix, 1, context)[0] for context in contexts}
    longest = max(contexts) + new_tokens + 1
    with open_sides(path, peers, context=longest, threads=threads, options=options) as (ours, theirs):
        report = _start("decode", path, ours, theirs, threads, rounds, new_tokens=new_tokens)
        costs = measure_costs(ours.bundle)
        for context, prompt in prompts.items():
            sides: dict[str, Callable[[], Any]] = {
                name: partial(side.complete, prompt, new_tokens) for name, side in _named(ours, theirs).items()
            }
            sides["read"] = partial(read_rate, max(costs.weight_bytes, _MIN_READ_BYTES), threads)
            found = alternate(sides, rounds, advance)
            rates = Summary(found.pop("read"))
            per_token = costs.bytes_read(context + new_tokens // 2)
            report["rows"].append(
                make_row(
                    f"decode after {context:,} tokens",
                    "tokens/s",
                    {name: [new_tokens / t.decode_s for t in runs] for name, runs in found.items()},
                    limit=(f"reading at {rates.median / 1e9:.1f} GB/s", rates.median / per_token),
                    details={
                        "MB read per token": per_token / 1e6,
                        "multiply-adds per token, M": costs.operations() / 1e6,
                        "leading tokens equal to ours": _equal(found),
                    },
                )
            )
            _check_text(report, found, context)
    return report


def measure_prefill(
    path: Path,
    peers: list[PeerModel],
    *,
    lengths: Sequence[int] = (512,),
    rounds: int = 5,
    threads: int,
    text: str | None = None,
    options: dict[str, Any] | None = None,
    advance: Advance = lambda: None,
) -> dict[str, Any]:
    """Prompt tokens/s up to the first token, for prompts of each length."""
    new_tokens = 8  # so that more than one token shows that both sides do the same
    ids, prefix = load_text_ids(path, text)
    prompts = {length: make_prompts(ids, prefix, 1, length)[0] for length in lengths}
    with open_sides(path, peers, context=max(lengths) + new_tokens + 1, threads=threads, options=options) as both:
        ours, theirs = both
        report = _start("prefill", path, ours, theirs, threads, rounds)
        costs = measure_costs(ours.bundle)
        for length, prompt in prompts.items():
            sides: dict[str, Callable[[], Any]] = {
                name: partial(side.complete, prompt, new_tokens) for name, side in _named(ours, theirs).items()
            }
            sides["products"] = partial(costs.prefill_seconds, length, threads)
            found = alternate(sides, rounds, advance)
            seconds = [s for s in found.pop("products") if s is not None]
            layouts = ", ".join(sorted({*costs.multiply_adds, costs.head[0]}))
            report["rows"].append(
                make_row(
                    f"prefill of {length:,} tokens",
                    "tokens/s",
                    {name: [length / t.prompt_s for t in runs] for name, runs in found.items()},
                    limit=(f"products in {layouts}", length / Summary(seconds).median) if seconds else None,
                    details={"leading tokens equal to ours": _equal(found)},
                )
            )
            _check_text(report, found, length)
    return report


def measure_batch(
    path: Path,
    peers: list[PeerModel],
    *,
    requests: Sequence[int] = (8, 32),
    prompt_tokens: int = 128,
    new_tokens: int = 128,
    rounds: int = 5,
    threads: int,
    text: str | None = None,
    options: dict[str, Any] | None = None,
    advance: Advance = lambda: None,
) -> dict[str, Any]:
    """Many requests at once: generated tokens/s, the prompts' computation included in the time."""
    most = max(requests)
    ids, prefix = load_text_ids(path, text)
    prompts_of = {count: make_prompts(ids, prefix, count, prompt_tokens) for count in requests}
    with open_sides(
        path, peers, context=prompt_tokens + new_tokens + 1, sequences=most, threads=threads, options=options
    ) as (ours, theirs):
        report = _start(
            "batch", path, ours, theirs, threads, rounds, prompt_tokens=prompt_tokens, new_tokens=new_tokens
        )
        costs = measure_costs(ours.bundle)
        for count, prompts in prompts_of.items():
            sides: dict[str, Callable[[], Any]] = {
                name: partial(side.batch, prompts, new_tokens) for name, side in _named(ours, theirs).items()
            }
            sides["limit"] = partial(_batch_seconds, costs, count, prompt_tokens, new_tokens, threads)
            found = alternate(sides, rounds, advance)
            seconds = [s for s in found.pop("limit") if s is not None]
            generated = count * new_tokens
            details: dict[str, Any] = {"leading tokens equal to ours, median of the requests": _equal_batches(found)}
            details |= python_share([times for run in found[OURS] for times in run.step_times])
            report["rows"].append(
                make_row(
                    f"{count} requests",
                    "tokens/s",
                    {name: [generated / t.seconds for t in runs] for name, runs in found.items()},
                    limit=("products and reading", generated / Summary(seconds).median) if seconds else None,
                    details=details,
                )
            )
    return report


def python_share(step_times: Sequence[tuple[float, float]]) -> dict[str, str]:
    """What of a step is not arithmetic: scheduler, batch, outputs. step_times: (whole, arithmetic) seconds."""
    if not step_times:
        return {}
    shares = [1 - min(compute / whole, 1.0) for whole, compute in step_times if whole > 0]
    outside = [max(whole - compute, 0.0) for whole, compute in step_times]
    middle, most = percentile(outside, 0.5) * 1e6, percentile(outside, 0.99) * 1e6
    return {
        "Python's share of a step": f"p50 {percentile(shares, 0.5):.1%}, p99 {percentile(shares, 0.99):.1%}",
        "Python per step": f"p50 {middle:,.0f} us, p99 {most:,.0f} us",
    }


def _batch_seconds(costs: Costs, count: int, prompt_tokens: int, new_tokens: int, threads: int) -> float | None:
    """The least time of a batch: its products at the measured rate, or its bytes at the measured bandwidth."""
    products = costs.prefill_seconds(count * prompt_tokens, threads)
    step = costs.prefill_seconds(count, threads)
    if products is None or step is None:
        return None
    # The head is needed for every token of a step, not once as in a prompt.
    step *= (sum(costs.multiply_adds.values()) + costs.head[1]) / max(sum(costs.multiply_adds.values()), 1)
    kept = count * (costs.bytes_read(prompt_tokens + new_tokens // 2) - costs.weight_bytes)
    reading = (costs.weight_bytes + kept) / read_rate(max(costs.weight_bytes, _MIN_READ_BYTES), threads)
    return products + (new_tokens - 1) * max(step, reading)


def _named(ours: OurSide, theirs: dict[str, TheirSide]) -> dict[str, OurSide | TheirSide]:
    return {OURS: ours, **theirs}


def _start(
    bench: str, path: Path, ours: OurSide, theirs: dict[str, TheirSide], threads: int, rounds: int, **settings: Any
) -> dict[str, Any]:
    versions: dict[str, str] = {}
    for side in theirs.values():
        versions |= side.versions
    return start_report(
        bench, path, versions, {"plan": ours.plan, "threads": threads, "alternations": rounds, **settings}
    )


def _equal(found: dict[str, list[Timing]]) -> dict[str, str]:
    """Per peer, how many of the leading tokens of the first run agree with ours."""
    mine = found[OURS][0].tokens
    return {
        name: f"{common_prefix(mine, runs[0].tokens)} of {len(mine)}" for name, runs in found.items() if name != OURS
    }


def _equal_batches(found: dict[str, list[BatchTiming]]) -> dict[str, str]:
    mine = found[OURS][0].tokens
    shown = {}
    for name, runs in found.items():
        if name != OURS:
            equal = [common_prefix(a, b) for a, b in zip(mine, runs[0].tokens, strict=True)]
            shown[name] = f"{percentile(equal, 0.5)} of {len(mine[0])}"
    return shown


def _check_text(report: dict[str, Any], found: dict[str, list[Timing]], context: int) -> None:
    """A note where a side does not even begin as ours does: then one of the two computes something else."""
    for name, runs in found.items():
        if name != OURS and common_prefix(found[OURS][0].tokens, runs[0].tokens) == 0:
            report["notes"].append(f"after {context:,} tokens {name} begins with another token than plait")
