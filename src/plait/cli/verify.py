"""`plait verify`: compare a checkpoint with transformers, token by token."""

from __future__ import annotations

import argparse
from typing import Any

from plait.cli.common import (
    add_model_argument,
    add_model_flags,
    engine_options,
    positive,
    print_json,
    print_table,
    progress,
    read_text,
)
from plait.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Loads the model with plait and with transformers, in fp32 unless --dtype says otherwise, and"
        " compares log-probabilities at every position and greedy texts. Exit status 0: they agree, 1: they differ."
    )
    add_model_argument(parser)
    parser.add_argument("--reference", metavar="PATH", help="let transformers read this checkpoint instead of MODEL")
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", help="a file with one prompt per line; - for standard input")
    parser.add_argument("--length", type=positive, metavar="N", help="tokens of the long built-in prompt")
    parser.add_argument("-n", "--new-tokens", type=_count, default=32, metavar="N", help="greedy tokens per prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_model_flags(parser, sampling=False)


def run(args: argparse.Namespace) -> int:
    texts = list(args.prompt)
    if args.prompts:
        texts += [line for line in read_text(args.prompts).splitlines() if line.strip()]
        if not texts:
            raise UsageError(f"{args.prompts} holds no prompts")
    options = engine_options(args)
    with progress("comparing with transformers"):
        from plait.verify.run import verify

        result = verify(
            args.model, reference=args.reference, texts=texts, length=args.length, new_tokens=args.new_tokens, **options
        )
    if args.json:
        print_json(result.to_json())
    else:
        _print(result)
    return 0 if result.passed else 1


def _print(result: Any) -> None:
    from plait.verify.report import HEADER, rows, verdict

    print(f"model:      {result.model}")
    print(f"reference:  {result.reference}")
    print(f"dtype:      {result.dtype}")
    for note in result.notes:
        print(f"note:       {note}")
    print()
    print_table(HEADER, rows(result))
    print()
    for line in verdict(result):
        print(line)


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)
