"""`plait train`: train a model from a recipe, or go on with a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from plait.cli.common import print_json, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train any family from a YAML recipe. The run's directory (out) holds its configuration, its log and its"
        " checkpoints; the same command, or the directory in place of the recipe, goes on with it. The directory is"
        " also a model: plait generate, serve, convert and inspect take it."
    )
    parser.add_argument("config", metavar="CONFIG", help="a recipe, or the directory of a run")
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="changes of the recipe, such as optimizer.lr=3e-4 or out=runs/a"
    )
    parser.add_argument("--show", action="store_true", help="print the resolved configuration and train nothing")
    parser.add_argument("--json", action="store_true", help="at the end, print the summary as one JSON document")


def run(args: argparse.Namespace) -> int:
    from plait.training.recipe import dump_yaml
    from plait.training.start import settle
    from plait.training.tree import to_plain

    config = settle(Path(args.config), args.words)
    if args.show:
        (print_json if args.json else _print)(to_plain(config) if args.json else dump_yaml(to_plain(config)))
        return 0

    from plait.training.progress import make_display
    from plait.training.start import train

    display = make_display(config.train.tokens)
    try:
        summary = train(config, display, display.stage)
    finally:
        display.close()
    if args.json:
        print_json(summary.to_json())
    for line in summary.lines():
        say(line)
    return 0 if summary.stopped is None else 128 + int(summary.stopped)


def _print(text: Any) -> None:
    print(text, end="")
