"""Runs the long acceptance scripts of this folder, in order of their numbers, and writes what they found.

    python tools/accept/run.py [NAME ...]      # all of them, or those whose names contain one of NAME

A script exits 0 (passed), 77 (cannot run here; its last line says what is missing) or anything else (failed).
docs/reports/accept/ gets one log per script, and summary.md with date, commit, CPU, results and times.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REPORTS = ROOT / "docs" / "reports" / "accept"
SKIPPED = 77
RESULTS = {0: "passed", SKIPPED: "cannot run here"}


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


def run(script: Path) -> tuple[str, float, str]:
    """Runs one script with its output on the terminal and in its log; (result, seconds, last line)."""
    start = time.monotonic()
    lines: list[str] = []
    environment = {**os.environ, "PYTHON": sys.executable}
    with subprocess.Popen(
        ["bash", str(script)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print("  " + line, end="", flush=True)
            lines.append(line.replace(str(ROOT), ".").replace(str(Path.home()), "~"))
        status = process.wait()
    seconds = time.monotonic() - start
    (REPORTS / f"{script.stem}.txt").write_text("".join(lines))
    return RESULTS.get(status, f"FAILED ({status})"), seconds, lines[-1].strip() if lines else ""


def main() -> int:
    wanted = sys.argv[1:]
    scripts = [s for s in sorted(HERE.glob("[0-9]*.sh")) if not wanted or any(name in s.stem for name in wanted)]
    if not scripts:
        sys.exit(f"no acceptance script matches {' '.join(wanted)}: there are {[s.stem for s in HERE.glob('*.sh')]}")
    from plait.kernels.machine import read_cpu_model

    REPORTS.mkdir(parents=True, exist_ok=True)
    rows, failed = [], False
    for script in scripts:
        print(f"== {script.stem}", flush=True)
        result, seconds, last = run(script)
        print(f"== {script.stem}: {result}, {seconds:.0f} s", flush=True)
        rows.append(f"| {script.stem} | {result} | {seconds:.0f} | {last} |")
        failed |= result not in RESULTS.values()
    today = datetime.datetime.now(datetime.UTC).date()
    heading = f"# Acceptance runs\n\n{today}, commit {commit()}, {read_cpu_model()}, {os.cpu_count()} CPUs.\n"
    table = "\n| script | result | s | last line |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    name = "summary.md" if not wanted else f"summary-{'-'.join(wanted)}.md"
    (REPORTS / name).write_text(heading + table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
