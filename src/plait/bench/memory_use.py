"""Memory of serving one request: the sum of the processes' PSS, keys and values apart, beside the size of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.bench.processes import MemoryWatch, ServerProcess
from plait.bench.report import OURS, make_row, start_report
from plait.bench.serving import stream_requests
from plait.bench.sides import PeerModel, TheirSide
from plait.bench.text import load_text_ids, make_prompts


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
    """Peak PSS in MB of `plait serve` from its start through one request, and of the peers' processes doing one."""
    ids, prefix = load_text_ids(path, text)
    (prompt,) = make_prompts(ids, prefix, 1, prompt_tokens)
    context = prompt_tokens + new_tokens + 1
    peak: dict[str, list[float]] = {}
    serving: dict[str, list[float]] = {}
    server = ServerProcess(path, threads, "--max-model-len", str(context), *serve_flags)
    try:
        with MemoryWatch(server.pid) as watch:
            server.wait_until_ready()
            stream_requests(server, [prompt], new_tokens, salt="memory")
            after = watch.sample()
        kept = server.metric("kv_pool_touched_bytes")
    finally:
        server.stop()
    peak[OURS], serving[OURS] = [(watch.peak - kept) / 1e6], [(after - kept) / 1e6]
    advance()
    versions: dict[str, str] = {}
    for peer in peers:
        side = TheirSide(peer.peer, peer.path, context=context, threads=threads, dtype=peer.dtype or None)
        try:
            with MemoryWatch(side.pid) as watch:
                side.complete(prompt, new_tokens)
                after = watch.sample()
            peak[peer.label], serving[peer.label] = [watch.peak / 1e6], [after / 1e6]
            versions |= side.versions
        finally:
            side.close()
        advance()
    report = start_report(
        "memory",
        path,
        versions,
        {"threads": threads, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
    )
    size = report["model"]["bytes"] / 1e6
    details = {
        "file, MB": size,
        "times the file": {name: values[0] / size for name, values in peak.items()},
        "after the request, MB": {name: values[0] for name, values in serving.items()},
        "keys and values in memory, not counted, MB": kept / 1e6,
    }
    report["rows"].append(make_row("peak memory of one request", "MB", peak, better="lower", details=details))
    report["notes"].append("a peer is one process without HTTP; its keys and values are counted")
    return report
