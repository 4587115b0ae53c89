"""What HTTP costs: 32 streams through `plait serve` against the same requests in process.

The in-process run has a process beside it that burns as much CPU as the load client took: what is compared is the
server, not the client.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.bench.peers import DRIVERS
from plait.bench.processes import ServerProcess, burning, running_server
from plait.bench.report import OURS, make_row, start_report
from plait.bench.sides import BatchTiming, OurSide
from plait.bench.summary import Summary, alternate, percentile
from plait.bench.text import load_text_ids, make_prompts
from plait.errors import PlaitError

IN_PROCESS = "in process, beside a burner"
_BEGINNING = 8  # characters


def measure_serve_overhead(
    path: Path,
    *,
    requests: int = 32,
    prompt_tokens: int = 128,
    new_tokens: int = 128,
    rounds: int = 5,
    threads: int,
    text: str | None = None,
    serve_flags: tuple[str, ...] = (),
    options: dict[str, Any] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Generated tokens/s of `requests` streams over HTTP and in process, in turn. advance: once per round and side."""
    ids, prefix = load_text_ids(path, text)
    prompts = make_prompts(ids, prefix, requests, prompt_tokens)
    context = prompt_tokens + new_tokens + 1
    # The sampling defaults of the checkpoint are left out on both sides.
    flags = ("--max-model-len", str(context), "--max-num-seqs", str(requests), "--generation-config", "none")
    latest: dict[str, Any] = {}  # of HTTP: the burner takes what its client took
    ours = OurSide(path, context=context, sequences=requests, threads=threads, **(options or {}))

    def over_http() -> dict[str, Any]:
        result = stream_requests(server, prompts, new_tokens, salt=str(latest.get("number", 0)))
        latest.update(number=latest.get("number", 0) + 1, share=result["cpu_s"] / result["seconds"])
        return {**result, "share": latest["share"]}

    def in_process() -> BatchTiming:
        with burning(latest["share"]):
            return ours.batch(prompts, [new_tokens] * len(prompts))

    with running_server(path, threads, *flags, *serve_flags) as server:
        found = alternate({OURS: over_http, IN_PROCESS: in_process}, rounds, advance)
        engines = {OURS: server.plan(), IN_PROCESS: ours.describe()}
    http = [requests * new_tokens / result["seconds"] for result in found[OURS]]
    inside = [requests * new_tokens / timing.seconds for timing in found[IN_PROCESS]]
    cpu = [result["share"] for result in found[OURS]]
    first = [s for result in found[OURS] for s in result["first_s"]]
    tokenizer = ours.bundle.tokenizer
    assert tokenizer is not None
    texts = [
        (a, tokenizer.decode(b)) for a, b in zip(found[OURS][0]["texts"], found[IN_PROCESS][0].tokens, strict=True)
    ]
    report = start_report(
        "serve-overhead",
        path,
        {},
        {
            "threads": threads,
            "alternations": rounds,
            "streams": requests,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
        },
        engines,
    )
    alike = sum(a[:_BEGINNING] == b[:_BEGINNING] for a, b in texts)
    if 2 * alike <= requests:
        report["notes"].append(f"only {alike} of {requests} streams begin with the text of the in-process run")
    details = {
        "streams with the text of the in-process run": f"{sum(a == b for a, b in texts)} of {requests}",
        "CPU of the load client": f"{Summary(cpu).median:.1%} of one processor",
        "seconds to the first chunk": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "share of the in-process run": f"{Summary(http).median / Summary(inside).median:.1%}",
    }
    sides = {OURS: http, IN_PROCESS: inside}
    report["rows"].append(make_row(f"{requests} streams over HTTP", "tokens/s", sides, details=details))
    return report


def stream_requests(server: ServerProcess, prompts: list[list[int]], new_tokens: int, salt: str) -> dict[str, Any]:
    """All prompts as streams from one client process: {"seconds", "cpu_s", "first_s", "texts"}.

    salt: keeps prompts of an earlier run from being found in the prefix cache. Raises PlaitError where a stream does
    not bring all its tokens.
    """
    body = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": new_tokens, "cache_salt": f"bench {salt}"}
    work = {"host": "127.0.0.1", "port": server.port}
    work |= {"bodies": [json.dumps({**body, "prompt": prompt}) for prompt in prompts]}
    command = [sys.executable, "-I", str(DRIVERS / "load_client.py")]
    done = subprocess.run(command, input=json.dumps(work), capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise PlaitError(f"the load client failed: {(done.stderr.strip().splitlines() or ['no words'])[-1]}")
    result = json.loads(done.stdout)
    for text in result["texts"]:
        if completion_tokens(text) != new_tokens:
            raise PlaitError(f"a stream brought {completion_tokens(text)} of {new_tokens} tokens: {text[:300]!r}")
    return {**result, "texts": [completion_text(text) for text in result["texts"]]}


def completion_text(response: str) -> str:
    """The text of a streamed answer, its chunks joined."""
    events = [json.loads(line[6:]) for line in response.splitlines() if line.startswith("data: {")]
    return "".join(choice.get("text", "") for event in events for choice in event.get("choices", ()))


def completion_tokens(response: str) -> int:
    """usage.completion_tokens of the last event of a streamed answer that has it; 0 without one."""
    for line in reversed(response.splitlines()):
        if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
            return int(usage["completion_tokens"])
    return 0
