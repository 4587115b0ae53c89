"""Runs the benchmarks on the two real models and writes what they say to benchmarks/.

    python tools/run_benchmarks.py                   # both models, everything: half an hour to an hour on two cores
    python tools/run_benchmarks.py --only decode     # one measurement; the others' last results stay in the pages
    python tools/run_benchmarks.py --write-only      # the pages and the README's table once more from the results

Each measurement is a `plait bench NAME --json` of its own. Its document is kept in benchmarks/results/, so that one can
be repeated without the others; pages and the README's table are made of these files.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from plait.bench.report import page, summary_table  # noqa: E402
from plait.bench.summary import significant  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"
TABLE = re.compile(r"(<!-- benchmarks: begin -->\n).*?(<!-- benchmarks: end -->)", re.DOTALL)
LLAMA = ("--peer", "llama-cpp")
FORMATS = ("--peer-model", "Q4_0", "--peer-model", "BF16")

# name of the result -> the words after `plait bench`, MODEL among them
RUNS: dict[str, tuple[str, ...]] = {
    "decode": ("decode", "MODEL", *LLAMA, *FORMATS, "--context", "128,2048"),
    "prefill": ("prefill", "MODEL", *LLAMA, *FORMATS),
    "batch": ("batch", "MODEL", *LLAMA, *FORMATS),
    "decode-bf16": ("decode", "MODEL", "--dtype", "bf16", *LLAMA, "--peer", "transformers", "--peer-model", "BF16"),
    "prefill-bf16": ("prefill", "MODEL", "--dtype", "bf16", *LLAMA, "--peer", "transformers", "--peer-model", "BF16"),
    "serve-overhead": ("serve-overhead", "MODEL"),
    "coldstart": ("coldstart", "MODEL", *LLAMA),
    "memory": ("memory", "MODEL", *LLAMA),
    "accuracy": ("accuracy", "MODEL", *LLAMA),
    "kv": ("kv", "MODEL"),
}
# Rows of these come into the README.
SHOWN = ("decode", "prefill", "batch", "coldstart", "memory")


def real_models() -> dict[str, Path]:
    """Name of the page -> file, for the models that are installed; one that is not is said."""
    import pytest

    from tests.real_models import gemma3_path, smollm2_path

    found = {}
    for name, path in (("smollm2-q4_1", smollm2_path), ("gemma3-270m-q4_k_m", gemma3_path)):
        try:
            found[name] = path()
        except pytest.skip.Exception as reason:
            print(f"{name}: left out: {reason}", flush=True)
    return found


def run(name: str, run_name: str, path: Path, extra: list[str]) -> None:
    """One measurement into benchmarks/results/."""
    words = [str(path) if word == "MODEL" else word for word in RUNS[run_name]]
    print(f"== {name}: plait bench {' '.join(words[:1] + words[2:] + extra)}", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "plait.cli.main", "bench", *words, *extra, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"plait bench {run_name} failed on {name}")
    report = json.loads(done.stdout)
    file = result_file(name, run_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for row in report["rows"]:
        print(f"   {row['task']}: {row['sides']['plait']['median']} {row['unit']}, ratios {row['ratios']}", flush=True)
    print(f"   ({significant(time.monotonic() - start, 3)} s)", flush=True)


def result_file(name: str, run_name: str) -> Path:
    return BENCHMARKS / "results" / name / f"{run_name}.json"


def results(name: str) -> dict[str, dict[str, Any]]:
    """The reports that there are, in the order of RUNS."""
    files = {run_name: result_file(name, run_name) for run_name in RUNS}
    return {run_name: json.loads(file.read_text()) for run_name, file in files.items() if file.is_file()}


def write_pages(names: list[str], readme: Path = ROOT / "README.md") -> None:
    """A page per model, and the README's table between its two marks, where it has them."""
    shown = []
    for name in names:
        reports = results(name)
        if not reports:
            continue
        (BENCHMARKS / f"{name}.md").write_text(page(name, reports.values(), "make bench"))
        shown += [reports[run_name] for run_name in SHOWN if run_name in reports]
    text = readme.read_text()
    if shown and TABLE.search(text):
        machine = shown[0]["machine"]
        lead = f"{machine['usable_cpus']} CPUs of {machine['cpu']}, kernels {machine['kernels']}, {shown[0]['date']}:"
        table = "\n".join([lead, "", *summary_table(shown)])
        readme.write_text(TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text))


def main() -> None:
    parser = argparse.ArgumentParser(description="run the benchmarks and write benchmarks/")
    parser.add_argument("--only", action="append", choices=RUNS, help="this measurement; repeatable (default: all)")
    parser.add_argument("--model", action="append", help="smollm2-q4_1 or gemma3-270m-q4_k_m (default: both)")
    parser.add_argument("--write-only", action="store_true", help="measure nothing, write the pages")
    arguments, extra = parser.parse_known_args()
    models = {k: v for k, v in real_models().items() if not arguments.model or k in arguments.model}
    for name, path in models.items() if not arguments.write_only else ():
        for run_name in arguments.only or RUNS:
            run(name, run_name, path, extra)
    write_pages(list(models))


if __name__ == "__main__":
    main()
