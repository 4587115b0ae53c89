"""What changed in the benchmarks between two commits: medians of the same task and side, and their ratios to the peers.

    python tools/compare_benchmarks.py OLD [NEW]     # NEW: default the files as they lie here

Reads benchmarks/results/ of both. Absolute figures come from different hours: the ratios to a peer are what counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from plait.bench.report import aligned, number, times  # noqa: E402

RESULTS = "benchmarks/results"


def reports_of(commit: str | None) -> dict[str, dict[str, Any]]:
    """Path of the result -> document, of a commit or of the working tree."""
    if commit is None:
        return {str(f.relative_to(ROOT)): json.loads(f.read_text()) for f in (ROOT / RESULTS).rglob("*.json")}
    names = _git("ls-tree", "-r", "--name-only", commit, "--", RESULTS).split()
    return {name: json.loads(_git("show", f"{commit}:{name}")) for name in names}


def compare(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows (result, task, our median before, after, change, then "peer before -> after" for every ratio)."""
    rows = []
    for name in sorted(old.keys() & new.keys()):
        before = {row["task"]: row for row in old[name]["rows"]}
        for row in new[name]["rows"]:
            past = before.get(row["task"])
            if past is None or "plait" not in past["sides"] or "plait" not in row["sides"]:
                continue
            a, b = past["sides"]["plait"]["median"], row["sides"]["plait"]["median"]
            ratios = ", ".join(
                f"{peer} {times(past['ratios'][peer])} -> {times(ratio)}"
                for peer, ratio in row["ratios"].items()
                if peer in past["ratios"]
            )
            change = f"{100 * (b / a - 1):+.1f}%" if a else ""
            stem = "/".join(Path(name).with_suffix("").parts[2:])
            rows.append((stem, row["task"], number(a), number(b), change, ratios))
    return rows


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="what changed in the benchmarks between two commits")
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    arguments = parser.parse_args()
    rows = compare(reports_of(arguments.old), reports_of(arguments.new))
    if not rows:
        raise SystemExit(f"no result in {RESULTS} of both")
    print("\n".join(aligned([("result", "task", "before", "after", "change", "plait is"), *rows])))


if __name__ == "__main__":
    main()
