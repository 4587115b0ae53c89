"""Mutations of small valid files, and what must come of each: it is read, or refused in one line of our own.

Every target builds one valid model directory and names the file in it that is mutated. A case takes no longer than
MAX_CASE_S of computing, and allocates no more than PEAK_BYTES in Python: the files have a few kilobytes.

    python -m tests.fuzzing 200000      # as `make accept` does, under a limit on the whole address space too
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import resource
import struct
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from tests.fuzz_targets import TARGETS, Target

PEAK_BYTES = 50_000_000
MAX_CASE_S = 5.0
# What the process may have beyond its size at the start: threads, the largest file and room for the allocator.
ADDRESS_SPACE_BYTES = 1 << 30
CHUNK = 4000

INTERESTING = (
    *(0, 1, 2, 7, 8, 31, 32, 127, 128, 255, 256, 1 << 16, 1 << 31, (1 << 32) - 1),
    *(1 << 40, 1 << 60, 1 << 63, (1 << 64) - 1),
)
BAD_VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 10**20, 10**400, 0.5, -1e308, 1e400, float("nan")),
    *("", "x", "<s>", "a\nb", "\u2581", "\ud800", "\0", "(" * 50, "x" * 5000),
    *([], {}, [[]], [None], ["a", 1], {"content": 1}, {"": ""}, [0] * 300),
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: bytes set, integers planted, pieces removed, repeated or moved, the end cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) or 1)
        kind = rng.randrange(7)
        if kind <= 1 and out:
            out[at] = rng.randrange(256)
        elif kind == 2:
            code = rng.choice("BIQ")
            value = rng.choice(INTERESTING) & ((1 << (8 * struct.calcsize("<" + code))) - 1)
            out[at : at + struct.calcsize("<" + code)] = struct.pack("<" + code, value)
        elif kind == 3:
            del out[at : at + rng.randint(1, 16)]
        elif kind == 4:
            out[at:at] = out[at : at + rng.randint(1, 64)]
        elif kind == 5:
            other = rng.randrange(len(out) or 1)
            out[at : at + 8], out[other : other + 8] = out[other : other + 8], out[at : at + 8]
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Half the time as bytes; else one or two values anywhere replaced, removed or repeated under another key."""
    if rng.random() < 0.5:
        return mutate(data, rng)
    document = json.loads(data)
    for _ in range(rng.randint(1, 2)):
        node, steps = document, rng.randint(0, 3)
        while steps and isinstance(node, dict | list) and node:
            child = node[rng.choice(list(node) if isinstance(node, dict) else range(len(node)))]
            if not isinstance(child, dict | list) or not child:
                break
            node, steps = child, steps - 1
        if not node:
            continue
        key: Any = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        kind = rng.randrange(4)
        if kind <= 1:
            node[key] = rng.choice(BAD_VALUES)
        elif kind == 2:
            del node[key]
        elif isinstance(node, dict):
            node[rng.choice(("x", "id", "type", *map(str, node)))] = node[key]
        else:
            node.append(node[key])
    try:
        return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except ValueError:  # 10**400 has too many digits for json
        return mutate(data, rng)


def outcome(path: Path, data: bytes, read: Callable[[Path], None]) -> str:
    """ "read" or "refused"; any other exception, or an error of several lines, fails the test."""
    path.write_bytes(data)
    start = time.process_time()
    try:
        read(path)
        result = "read"
    except PlaitError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < 2000, text
        result = "refused"
    assert time.process_time() - start < MAX_CASE_S, "this case took too long"
    return result


def run(target: Target, cases: int, folder: Path, seed: int = 0) -> Counter[str]:
    """Read `cases` mutations of a target's file; how many were read and refused, and the peak of one in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    target.build(folder)
    path = folder / target.file
    original = path.read_bytes()
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    loggers = [logging.getLogger(f"plait.{name}") for name in ("config", "tokenizer")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        assert outcome(path, original, target.read) == "read"
        tracemalloc.start()
        try:
            for _ in range(cases):
                data = (mutate_json if target.is_json else mutate)(original, rng)
                faulthandler.dump_traceback_later(120, exit=True)  # a hang in a library cannot be interrupted
                try:
                    counts[outcome(path, data, target.read)] += 1
                except BaseException:
                    (folder / "failing").write_bytes(data)
                    raise
                peak = tracemalloc.get_traced_memory()[1]
                assert peak < PEAK_BYTES, f"{peak} bytes at once"
        finally:
            counts["peak bytes"] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            faulthandler.cancel_dump_traceback_later()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
    return counts


def shares(cases: int) -> dict[str, int]:
    """How many of `cases` each target gets, at least one."""
    total = sum(target.weight for target in TARGETS.values())
    return {name: max(cases * target.weight // total, 1) for name, target in TARGETS.items()}


def _limit_address_space() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE_BYTES, hard))


def _chunk(name: str, cases: int, seed: int) -> tuple[str, Counter[str], float]:
    """In a process of its own: mutations of one target under a limit on the address space."""
    with tempfile.TemporaryDirectory() as scratch:
        run(TARGETS[name], 1, Path(scratch) / "first")  # libraries and their threads come before the limit does
        _limit_address_space()
        start = time.process_time()
        return name, run(TARGETS[name], cases, Path(scratch) / "more", seed), time.process_time() - start


def main(cases: int) -> None:
    """`cases` mutations in as many processes as there are CPUs; a line per target."""
    chunks = [
        (name, min(CHUNK, share - start), 1 + start)
        for name, share in shares(cases).items()
        for start in range(0, share, CHUNK)
    ]
    found: dict[str, Counter[str]] = {name: Counter() for name in TARGETS}
    seconds: Counter[str] = Counter()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_chunk, *chunk) for chunk in chunks]):
            name, counts, spent = done.result()
            found[name] |= {"peak bytes": counts.pop("peak bytes")}
            found[name].update(counts)
            seconds[name] += round(spent)
    print(f"{'mutated':<24}{'read':>8} {'refused':>8} {'MB at most':>11} {'CPU s':>6}")
    for name, counts in found.items():
        peak = counts.pop("peak bytes") / 1e6
        print(f"{name:<24}{counts['read']:>8} {counts['refused']:>8} {peak:>11.1f} {seconds[name]:>6}")
    total = sum(counts.total() for counts in found.values())
    print(f"{total} mutated files: each was read, or refused in one line, within its bounds of time and memory")


if __name__ == "__main__":
    main(int(sys.argv[1]))
