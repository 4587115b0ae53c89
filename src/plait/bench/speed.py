"""Decode, prefill and batch: tokens per second of ours and of the peers, in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from plait.bench.costs import Costs, measure_costs
from plait.bench.limits import READ_ROUNDS, read_rate
from plait.bench.report import OURS, make_row, start_report
from plait.bench.sides import BatchTiming, OurSide, PeerModel, TheirSide, Timing, open_sides
from plait.bench.summary import Summary, alternate, common_prefix, percentile
from plait.bench.text import load_text_ids, make_prompts
from plait.errors import PlaitError

Advance = Callable[[], None]
# The bandwidth is measured with a buffer that no cache holds, however small the model.
_MIN_READ_BYTES = 100 << 20
_TRIAL_TOKENS = 8  # new ones of the batch on which a peer chooses between its settings
_PLAUSIBLE_TOKENS = 4  # leading ones that two engines which round differently still have in common


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
            read_bytes = max(costs.weight_bytes, _MIN_READ_BYTES)
            runs = {name: partial(side.complete, prompt, new_tokens) for name, side in _named(ours, theirs).items()}
            found, rate = _in_turn(runs, partial(read_rate, read_bytes, threads), rounds, advance)
            assert rate is not None
            per_token = costs.bytes_read(context + new_tokens // 2)
            report["rows"].append(
                make_row(
                    f"decode after {context:,} tokens",
                    "tokens/s",
                    {name: [new_tokens / t.decode_s for t in timings] for name, timings in found.items()},
                    limit=(_read_words(rate, read_bytes), rate / per_token),
                    details={
                        "MB read per token": per_token / 1e6,
                        "multiply-adds per token, M": costs.operations() / 1e6,
                        "leading tokens equal to ours": _equal(found),
                    },
                )
            )
            _check_text(report, found, f"after {context:,} tokens", new_tokens + 1)
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
            runs = {name: partial(side.complete, prompt, new_tokens) for name, side in _named(ours, theirs).items()}
            found, seconds = _in_turn(runs, partial(_prompt_seconds, costs, length, threads), rounds, advance)
            kinds = "products in " + ", ".join(sorted({*costs.multiply_adds, costs.head[0]})) + ", attention in F32"
            report["rows"].append(
                make_row(
                    f"prefill of {length:,} tokens",
                    "tokens/s",
                    {name: [length / t.prompt_s for t in timings] for name, timings in found.items()},
                    limit=(kinds, length / seconds) if seconds else None,
                    details={"leading tokens equal to ours": _equal(found)},
                )
            )
            _check_text(report, found, f"after {length:,} tokens", new_tokens + 1)
    return report


def measure_batch(
    path: Path,
    peers: list[PeerModel],
    *,
    requests: Sequence[int] = (8, 32),
    prompt_tokens: int = 128,
    new_tokens: int = 128,
    random_lengths: bool = False,
    rounds: int = 5,
    threads: int,
    text: str | None = None,
    options: dict[str, Any] | None = None,
    advance: Advance = lambda: None,
) -> dict[str, Any]:
    """Many requests at once: generated tokens/s, the prompts' computation included in the time.

    random_lengths: prompts and outputs of a quarter to seven quarters of these numbers of tokens, the same on all
    sides and in all rounds.
    """
    most = max(requests)
    ids, prefix = load_text_ids(path, text)
    longest = 7 * prompt_tokens // 4 if random_lengths else prompt_tokens
    prompts_of = {count: make_prompts(ids, prefix, count, longest) for count in requests}
    outputs_of = {count: [new_tokens] * count for count in requests}
    context = longest + new_tokens + 1
    if random_lengths:
        draw = np.random.default_rng(0)
        for count, prompts in prompts_of.items():
            lengths = draw.integers(max(prompt_tokens // 4, len(prefix) + 1), longest, count, endpoint=True)
            prompts_of[count] = [prompt[:n] for prompt, n in zip(prompts, lengths.tolist(), strict=True)]
            outputs_of[count] = draw.integers(
                max(new_tokens // 4, 1), 7 * new_tokens // 4, count, endpoint=True
            ).tolist()
        context = longest + 7 * new_tokens // 4 + 1
    with open_sides(path, peers, context=context, sequences=most, threads=threads, options=options) as (ours, theirs):
        report = _start(
            "batch", path, ours, theirs, threads, rounds, prompt_tokens=prompt_tokens, new_tokens=new_tokens
        )
        report["settings"]["random lengths"] = random_lengths
        for name, side in theirs.items():
            _settle_batch(report, name, side, prompts_of[most])
        costs = measure_costs(ours.bundle)
        for count, prompts in prompts_of.items():
            outputs = outputs_of[count]
            runs = {name: partial(side.batch, prompts, outputs) for name, side in _named(ours, theirs).items()}
            limit = partial(_batch_seconds, costs, [len(prompt) for prompt in prompts], outputs, threads)
            found, seconds = _in_turn(runs, limit, rounds, advance)
            generated = sum(outputs)
            details: dict[str, Any] = {
                "requests with our first token": _equal_firsts(found),
                "leading tokens equal to ours, median of the requests": _equal_batches(found),
            }
            details |= python_share([times for run in found[OURS] for times in run.step_times])
            report["rows"].append(
                make_row(
                    f"{count} requests" + (" of random lengths" if random_lengths else ""),
                    "tokens/s",
                    {name: [generated / t.seconds for t in timings] for name, timings in found.items()},
                    limit=("products and reading", generated / seconds) if seconds else None,
                    details=details,
                )
            )
            _check_batch(report, found, outputs)
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


def _in_turn(
    runs: Mapping[str, Callable[[], Any]], limit: Callable[[], float | None], rounds: int, advance: Advance
) -> tuple[dict[str, list[Any]], float | None]:
    """Every side's runs, and the median of what limits them, measured between them; None where nothing measures it."""
    found = alternate({**runs, "limit": limit}, rounds, advance)
    measured = [value for value in found.pop("limit") if value is not None]
    return found, Summary(measured).median if measured else None


def _prompt_seconds(costs: Costs, tokens: int, threads: int) -> float | None:
    """The least time of a prompt: its products at the rates measured now."""
    rates = costs.rates(threads)
    return None if rates is None else costs.seconds(rates, tokens, 1, costs.attended(0, tokens))


def _batch_seconds(costs: Costs, prompts: Sequence[int], outputs: Sequence[int], threads: int) -> float | None:
    """The least time of a batch whose requests all run at once: the prompts' products at the rates measured now, then
    step by step the products of the requests that are not done or, where that takes longer, their bytes.

    prompts, outputs: tokens of each request.
    """
    rates = costs.rates(threads)
    if rates is None:
        return None
    bandwidth = read_rate(max(costs.weight_bytes, _MIN_READ_BYTES), threads)
    total = costs.seconds(rates, sum(prompts), len(prompts), sum(costs.attended(0, n) for n in prompts))
    for step in range(1, max(outputs)):  # the first token of each comes with its prompt
        contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
        attended = sum(costs.attended(context - 1, 1) for context in contexts)
        kept = sum(costs.bytes_read(context) - costs.weight_bytes for context in contexts)
        products = costs.seconds(rates, len(contexts), len(contexts), attended)
        total += max(products, (costs.weight_bytes + kept) / bandwidth)
    return total


def _named(ours: OurSide, theirs: dict[str, TheirSide]) -> dict[str, OurSide | TheirSide]:
    return {OURS: ours, **theirs}


def _start(
    bench: str, path: Path, ours: OurSide, theirs: dict[str, TheirSide], threads: int, rounds: int, **settings: Any
) -> dict[str, Any]:
    versions: dict[str, str] = {}
    for side in theirs.values():
        versions |= side.versions
    engines = {name: side.describe() for name, side in _named(ours, theirs).items()}
    return start_report(bench, path, versions, {"threads": threads, "alternations": rounds, **settings}, engines)


def _read_words(rate: float, num_bytes: int) -> str:
    return f"read bandwidth, median of {READ_ROUNDS} rounds of {num_bytes / 1e6:,.0f} MB: {rate / 1e9:.1f} GB/s"


def _settle_batch(report: dict[str, Any], name: str, side: TheirSide, prompts: list[list[int]]) -> None:
    """Let a peer choose on a short batch, half of each prompt; what it chose is noted."""
    short = [prompt[: max(len(prompt) // 2, 1)] for prompt in prompts]
    chosen = side.settle_batch(short, _TRIAL_TOKENS) if len(prompts) > 1 else None
    if chosen is not None:
        seconds = ", ".join(f"{what} {s:.3g} s" for what, s in chosen["seconds"].items())
        report["engines"][name]["batch"] = chosen["kept"]
        report["notes"].append(
            f"{name} runs with {chosen['kept']}, chosen on a short batch of {len(short)} requests ({seconds})"
        )


def _equal(found: dict[str, list[Timing]]) -> dict[str, str]:
    """Per peer, how many of the leading tokens of the first run agree with ours."""
    mine = found[OURS][0].tokens
    return {
        name: f"{common_prefix(mine, runs[0].tokens)} of {len(mine)}" for name, runs in found.items() if name != OURS
    }


def _equal_batches(found: dict[str, list[BatchTiming]]) -> dict[str, str]:
    """Per peer, how many of the leading tokens of a request agree with ours, in the middle of the requests."""
    length = percentile([len(tokens) for tokens in found[OURS][0].tokens], 0.5)
    return {name: f"{percentile(prefixes, 0.5)} of {length}" for name, prefixes in _prefixes(found).items()}


def _equal_firsts(found: dict[str, list[BatchTiming]]) -> dict[str, str]:
    return {name: f"{sum(n > 0 for n in prefixes)} of {len(prefixes)}" for name, prefixes in _prefixes(found).items()}


def _prefixes(found: dict[str, list[BatchTiming]]) -> dict[str, list[int]]:
    """By peer: how many leading tokens of each request of the first run agree with ours."""
    mine = found[OURS][0].tokens
    return {
        name: [common_prefix(a, b) for a, b in zip(mine, runs[0].tokens, strict=True)]
        for name, runs in found.items()
        if name != OURS
    }


def _check_text(report: dict[str, Any], found: dict[str, list[Timing]], where: str, wanted: int) -> None:
    """A note where a side does not begin as ours does: then one of the two computes something else.

    Raises PlaitError where a side brought fewer tokens than `wanted`: its time is of something else.
    """
    for name, runs in found.items():
        _check_counts(name, [len(run.tokens) for run in runs], wanted)
        equal = common_prefix(found[OURS][0].tokens, runs[0].tokens)
        if equal == 0:
            report["notes"].append(f"{where} {name} begins with another token than {OURS}")
        elif equal < min(_PLAUSIBLE_TOKENS, wanted):
            report["notes"].append(f"{where} {name} has only {equal} leading tokens in common with {OURS}")


def _check_batch(report: dict[str, Any], found: dict[str, list[BatchTiming]], wanted: list[int]) -> None:
    """A note where a side's text is not ours for most requests: other first tokens, or only those in common."""
    count = len(wanted)
    for name, runs in found.items():
        for run in runs:
            for tokens, number in zip(run.tokens, wanted, strict=True):
                _check_counts(name, [len(tokens)], number)
    for name, prefixes in _prefixes(found).items():
        alike = sum(n > 0 for n in prefixes)
        if 2 * alike <= count:
            report["notes"].append(f"{count} requests: only {alike} begin with the same token on {name} as on {OURS}")
        elif percentile(prefixes, 0.5) < min(_PLAUSIBLE_TOKENS, *wanted):
            report["notes"].append(
                f"{count} requests: most have under {_PLAUSIBLE_TOKENS} tokens in common with {name}"
            )


def _check_counts(name: str, counts: Sequence[int], wanted: int) -> None:
    if wrong := [n for n in counts if n != wanted]:
        raise PlaitError(f"{name} brought {wrong[0]} tokens where {wanted} were asked for: nothing to compare")
