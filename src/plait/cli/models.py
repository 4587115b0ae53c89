"""`plait models`: which families there are, and what a context costs."""

from __future__ import annotations

import argparse
from typing import Any

from plait.cli.common import positive, print_json, print_table
from plait.model.kv_arithmetic import DEFAULT_CONTEXT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Key/value arithmetic (bf16) of public configurations, or of the checkpoints given."
    parser.add_argument("paths", nargs="*", metavar="PATH", help="checkpoints or config.json files")
    parser.add_argument(
        "--context", type=positive, default=DEFAULT_CONTEXT, metavar="N", help="tokens of a context (default: 32768)"
    )
    parser.add_argument("--memory", metavar="SIZE", help="also count the requests whose keys and values fit in SIZE")
    parser.add_argument(
        "--subtract-weights", action="store_true", help="take the weights in bf16 off --memory (default: not)"
    )
    parser.add_argument("--strict", action="store_true", help="unknown keys of a config.json are errors")
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> int:
    from plait.engine.build import parse_bytes
    from plait.errors import UsageError
    from plait.model.kv_arithmetic import table

    if args.subtract_weights and args.memory is None:
        raise UsageError("--subtract-weights needs --memory")
    if args.strict and not args.paths:
        raise UsageError("--strict needs a PATH whose configuration is read")
    memory = None if args.memory is None else parse_bytes(args.memory)
    rows = table(_models(args), args.context, memory, args.subtract_weights)
    if args.json:
        print_json(rows)
        return 0
    if not args.paths:
        _print_families()
    _print_rows(rows, args)
    return 0


def _models(args: argparse.Namespace) -> list[Any]:
    if not args.paths:
        from plait.model.known_models import known_models

        return known_models()
    from plait.model.kv_arithmetic import facts_of
    from plait.weights.checkpoint import read_config

    return [facts_of(path, read_config(path, args.strict)) for path in args.paths]


def _print_families() -> None:
    from plait.model.families import families

    rows = [(name, family.proved_on) for name, family in sorted(families().items())]
    print_table(("family", "proved on"), rows)
    print()


def _print_rows(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from plait.model.known_models import arithmetic_only

    size = "GiB_for_32k_tokens" if args.context == DEFAULT_CONTEXT else "GiB_for_context"
    header = ["model", "KiB/token", f"GiB for {args.context:,}", "saving", "window"]
    if args.memory is not None:
        header += ["requests", "without recycling"]
    lines = []
    later = set() if args.paths else arithmetic_only()
    for row in rows:
        cells = [
            row["model"] + " *" * (row["model"] in later),
            f"{row['kv_KiB_per_token']:.1f}",
            f"{row[size]:.2f}",
            row["saving_vs_full_mha"],
            str(row["sliding_window"] or "-"),
        ]
        if args.memory is not None:
            cells += [f"{row['requests_with_recycling']:,}", f"{row['requests_without_recycling']:,}"]
        lines.append(tuple(cells))
    print_table(tuple(header), lines)
    if later:
        print("\n* the arithmetic only: this version does not run the family yet")
    if args.memory is not None:
        rest = "after the bf16 weights" if args.subtract_weights else "all of it for keys and values, weights apart"
        print(
            f"\nrequests: contexts of {args.context:,} tokens that fit in {args.memory} at once ({rest}),"
            " in bf16 blocks of 16 tokens;\nwith recycling, blocks that have left their layer's window are reused."
        )
