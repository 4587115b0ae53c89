"""`plait bench`: measurements against a peer in the same run, and the limits of the machine."""

from __future__ import annotations

import argparse
from typing import Any

from plait.cli.common import MODEL_HELP, Counter, positive, print_json, print_table, progress
from plait.errors import UsageError

NAMES = {
    "decode": "tokens/s of one greedy request after its prompt, beside transformers",
    "prefill": "tokens/s of a prompt, beside transformers",
    "limits": "read bandwidth and matrix-product rates of this machine",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "; ".join(f"{k}: {v}" for k, v in NAMES.items())
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--prompt-tokens", type=positive, metavar="N", help="default: 128 for decode, 512 for prefill")
    parser.add_argument("--new-tokens", type=positive, metavar="N", help="default: 64 for decode, 4 for prefill")
    parser.add_argument("--rounds", type=positive, metavar="N", help="alternations that count (default: 5)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all that may be used)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.name == "limits":
        _refuse_unused(args)
        from plait.bench.limits import measure

        with progress("measuring"):
            report = measure()
        if args.json:
            print_json(report)
        else:
            _print_machine(report)
            for kind in ("read GB/s", "GEMM GFLOP/s"):
                print_table((kind, "rate"), [(name, f"{value}") for name, value in report[kind].items()])
        return 0
    from plait.bench.transformers_peer import compare

    decode = args.name == "decode"
    rounds = args.rounds or 5
    with Counter("alternations", 2 * (rounds + 1)) as counter:
        report = compare(
            args.model,
            args.prompt_tokens or (128 if decode else 512),
            args.new_tokens or (64 if decode else 4),
            rounds,
            args.threads,
            lambda: counter.advance(1),
        )
    if args.json:
        print_json(report)
        return 0
    _print_machine(report)
    task = report[args.name]
    rows = [
        (precision, f"{sides['plait']}", f"{sides['transformers']}")
        for precision, sides in task["tokens_per_s"].items()
    ]
    print_table((f"{args.name}, tokens/s", "plait", "transformers"), rows)
    print(f"ratio, each side at its fastest precision: {task['ratio_at_fastest_precision']}")
    equal = ", ".join(f"{n} in {p}" for p, n in report["equal_leading_tokens"].items())
    print(f"leading tokens that both sides agree on: {equal} of {report['new_tokens'] + 1}")
    return 0


def _refuse_unused(args: argparse.Namespace) -> None:
    for name in ("model", "prompt_tokens", "new_tokens", "rounds", "threads"):
        if getattr(args, name) is not None:
            flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} would be ignored: `plait bench limits` measures the machine alone")


def _print_machine(report: dict[str, Any]) -> None:
    machine = report["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    print(f"{machine['cpu']}, {machine['usable_cpus']} CPUs; {versions}")
