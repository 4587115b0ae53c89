"""Memory of serving one request: the sum of the processes' PSS from their start, beside the size of the file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from plait.bench.coldstart import CACHE_VARIABLE
from plait.bench.processes import MemoryWatch, ServerProcess
from plait.bench.report import OURS, make_row, start_report
from plait.bench.serving import stream_requests
from plait.bench.sides import PeerModel, TheirSide
from plait.bench.text import load_text_ids, make_prompts

FIRST_TIME = f"{OURS} first time"


class Used(NamedTuple):
    """Bytes: the peak from the process's start through one request, and after it; of keys and values, apart."""

    peak: int
    after: int
    kept: float
    engine: dict[str, str]


def measure_memory(
    path: Path,
    peers: list[PeerModel],
    *,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    threads: int,
    text: str | None = None,
    serve_flags: tuple[str, ...] = (),
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Peak PSS in MB of every side, loading included: `plait serve` without its cache of packed weights, then with it,
    and the peers' processes."""
    ids, prefix = load_text_ids(path, text)
    (prompt,) = make_prompts(ids, prefix, 1, prompt_tokens)
    context = prompt_tokens + new_tokens + 1
    found: dict[str, Used] = {}
    flags = ("--max-model-len", str(context), *serve_flags)
    with TemporaryDirectory() as cache:  # empty for the first start, and there for the second
        for name in (FIRST_TIME, OURS):
            found[name] = _serve(ServerProcess(path, threads, *flags, **{CACHE_VARIABLE: cache}), prompt, new_tokens)
            advance()
    versions: dict[str, str] = {}
    for peer in peers:
        with ExitStack() as stack:
            watch: list[MemoryWatch] = []
            side = TheirSide(
                peer.peer,
                peer.path,
                context=context,
                threads=threads,
                dtype=peer.dtype or None,
                started=lambda pid: watch.append(stack.enter_context(MemoryWatch(pid))),  # noqa: B023
            )
            stack.callback(side.close)
            side.complete(prompt, new_tokens)
            after = watch[0].sample()
            found[peer.label] = Used(watch[0].peak, after, 0, side.describe())
            versions |= side.versions
        advance()
    found = {OURS: found.pop(OURS), **found}
    report = start_report(
        "memory",
        path,
        versions,
        {"threads": threads, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
        {name: used.engine for name, used in found.items()},
    )
    size = report["model"]["bytes"]
    peaks = {name: used.peak - used.kept for name, used in found.items()}
    details = {
        "file, MB": size / 1e6,
        "times the file": {name: peak / size for name, peak in peaks.items()},
        "after the request, MB": {name: (used.after - used.kept) / 1e6 for name, used in found.items()},
        "keys and values in memory, not counted, MB": found[OURS].kept / 1e6,
    }
    sides = {name: [peak / 1e6] for name, peak in peaks.items()}
    report["rows"].append(make_row("peak memory of one request", "MB", sides, better="lower", details=details))
    report["notes"] += [
        f"every side is watched from its process's start, loading included; {OURS} starts with its cache of packed"
        f" weights, {FIRST_TIME} without: it packs them and writes it",
        "a peer is one process without HTTP; its keys and values are counted",
    ]
    return report


def _serve(server: ServerProcess, prompt: list[int], new_tokens: int) -> Used:
    try:
        with MemoryWatch(server.pid) as watch:
            server.wait_until_ready()
            stream_requests(server, [prompt], new_tokens, salt="memory")
            after = watch.sample()
        return Used(watch.peak, after, server.metric("kv_pool_touched_bytes"), server.plan())
    finally:
        server.stop()
