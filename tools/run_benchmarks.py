"""Runs the benchmarks on the two real models and writes what they say to benchmarks/.

    python tools/run_benchmarks.py                   # both models, everything: half an hour to an hour on two cores
    python tools/run_benchmarks.py --quick           # what matters most, three alternations: about twelve minutes
    python tools/run_benchmarks.py --only decode     # one measurement; the others' last results stay in the pages
    python tools/run_benchmarks.py --write-only      # the pages and the README's table once more from the results

Flags that it does not know are handed to every `plait bench` that takes them, such as --threads 4.
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

from plait.bench.report import origins, page, summary_table  # noqa: E402
from plait.bench.summary import significant  # noqa: E402
from plait.cli.bench import NAMES  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"
TABLE = re.compile(r"(<!-- benchmarks: begin -->\n).*?(<!-- benchmarks: end -->)", re.DOTALL)
LLAMA = ("--peer", "llama-cpp")
FORMATS = ("--peer-model", "Q4_0", "--peer-model", "BF16")

# name of the result -> the words after `plait bench`, MODEL among them
RUNS: dict[str, tuple[str, ...]] = {
    "decode": ("decode", "MODEL", *LLAMA, *FORMATS, "--context", "128,2048"),
    "prefill": ("prefill", "MODEL", *LLAMA, *FORMATS),
    "batch": ("batch", "MODEL", *LLAMA, *FORMATS),
    "batch-random": ("batch", "MODEL", *LLAMA, "--requests", "32", "--random-lengths"),
    "decode-bf16": ("decode", "MODEL", "--dtype", "bf16", *LLAMA, "--peer", "transformers", "--peer-model", "BF16"),
    "prefill-bf16": ("prefill", "MODEL", "--dtype", "bf16", *LLAMA, "--peer", "transformers", "--peer-model", "BF16"),
    "serve-overhead": ("serve-overhead", "MODEL"),
    "coldstart": ("coldstart", "MODEL", *LLAMA),
    "memory": ("memory", "MODEL", *LLAMA),
    "accuracy": ("accuracy", "MODEL", *LLAMA),
    "kv": ("kv", "MODEL"),
}
# The same of --quick, by model; a result takes the place of the full set's.
Q4_0 = ("--peer-model", "Q4_0")
THREE = ("--rounds", "3")
QUICK: dict[str, dict[str, tuple[str, ...]]] = {
    "smollm2-q4_1": {
        "decode": ("decode", "MODEL", *LLAMA, *Q4_0, *THREE, "--context", "16,2048"),
        "prefill": ("prefill", "MODEL", *LLAMA, *Q4_0, *THREE),
        "batch": ("batch", "MODEL", *LLAMA, *Q4_0, *THREE, "--requests", "8,32"),
        "coldstart": ("coldstart", "MODEL", *LLAMA, *THREE),
        "memory": ("memory", "MODEL", *LLAMA),
        "accuracy": ("accuracy", "MODEL", *LLAMA),
    },
    "gemma3-270m-q4_k_m": {
        "decode": ("decode", "MODEL", *LLAMA, *THREE),
        "prefill": ("prefill", "MODEL", *LLAMA, *THREE),
        "accuracy": ("accuracy", "MODEL", *LLAMA),
    },
}
MODELS = tuple(QUICK)
# Rows of these come into the README.
SHOWN = ("decode", "prefill", "batch", "batch-random", "coldstart", "memory")


def real_models() -> dict[str, Path]:
    """Name of the page -> file, for the models that are installed; one that is not is said."""
    import pytest

    from tests.real_models import gemma3_path, smollm2_path

    found = {}
    for name, path in zip(MODELS, (smollm2_path, gemma3_path), strict=True):
        try:
            found[name] = path()
        except pytest.skip.Exception as reason:
            print(f"{name}: left out: {reason}", flush=True)
    return found


def run(name: str, run_name: str, words: tuple[str, ...], path: Path, extra: list[str]) -> None:
    """One measurement into benchmarks/results/. words: after `plait bench`, MODEL among them."""
    words = tuple(str(path) if word == "MODEL" else word for word in words)
    extra = applicable(words[0], extra)
    print(f"== {name}: plait bench {' '.join([words[0], *words[2:], *extra])}", flush=True)
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


def applicable(bench: str, extra: list[str]) -> list[str]:
    """Of further flags, each with one value, those that a benchmark takes. One that none takes ends the program."""
    kept: list[str] = []
    for flag, value in zip(extra[::2], [*extra[1::2], ""], strict=False):
        takers = [name for name, known in NAMES.items() if flag.removeprefix("--").replace("-", "_") in known.flags]
        if not flag.startswith("--") or not takers or not value:
            raise SystemExit(f"{' '.join(extra)}: give flags of `plait bench` with a value each")
        kept += [flag, value] if bench in takers else []
    return kept


def result_file(name: str, run_name: str) -> Path:
    return BENCHMARKS / "results" / name / f"{run_name}.json"


def results(name: str) -> dict[str, dict[str, Any]]:
    """The reports that there are, in the order of RUNS."""
    files = {run_name: result_file(name, run_name) for run_name in RUNS}
    return {run_name: json.loads(file.read_text()) for run_name, file in files.items() if file.is_file()}


def write_pages(readme: Path | None = ROOT / "README.md") -> None:
    """A page per model that has results, measured now or before, and the README's table between its two marks."""
    shown = []
    for name in MODELS:
        reports = results(name)
        if not reports:
            continue
        (BENCHMARKS / f"{name}.md").write_text(page(name, reports.values(), "make bench"))
        shown += [reports[run_name] for run_name in SHOWN if run_name in reports]
    text = readme.read_text() if readme is not None else ""
    if readme is not None and shown and TABLE.search(text):
        table = "\n".join(["; ".join(origins(shown)) + ":", "", *summary_table(shown)])
        readme.write_text(TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text))


def main() -> None:
    global BENCHMARKS
    parser = argparse.ArgumentParser(description="run the benchmarks and write benchmarks/", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="the short set: about twelve minutes on two cores")
    parser.add_argument("--only", action="append", choices=RUNS, help="this measurement; repeatable (default: all)")
    parser.add_argument("--model", action="append", choices=MODELS, help="this model; repeatable (default: both)")
    parser.add_argument("--write-only", action="store_true", help="measure nothing, write the pages")
    parser.add_argument("--into", type=Path, metavar="DIR", help="instead of benchmarks/; the README stays as it is")
    arguments, extra = parser.parse_known_args()
    applicable("decode", extra)
    BENCHMARKS = arguments.into or BENCHMARKS
    start = time.monotonic()
    models = {} if arguments.write_only else real_models()
    for name, path in models.items():
        for run_name, words in (QUICK[name] if arguments.quick else RUNS).items():
            if name in (arguments.model or MODELS) and run_name in (arguments.only or RUNS):
                run(name, run_name, words, path, extra)
    write_pages(None if arguments.into else ROOT / "README.md")
    if models:
        print(f"{(time.monotonic() - start) / 60:.1f} minutes; pages in {BENCHMARKS}")


if __name__ == "__main__":
    main()
