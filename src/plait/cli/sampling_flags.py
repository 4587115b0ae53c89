"""The sampling flags of `generate` and `chat`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from plait.cli.common import not_supported_yet, positive

if TYPE_CHECKING:
    from plait.engine.llm import LLM
    from plait.engine.params import SamplingParams


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("-n", "--max-tokens", type=positive, metavar="N", help="most tokens of an answer (default: 256)")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's, else 0.7)"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens; 0 is off")
    group.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that sum to P")
    group.add_argument("--min-p", type=float, metavar="P", help="leave out tokens below P times the likeliest")
    group.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    group.add_argument("--beams", type=positive, metavar="W", help="beam search (not supported yet)")


def check_sampling_flags(args: argparse.Namespace) -> None:
    """Refuse what does not exist yet, and values out of range, before a model is loaded."""
    from plait.engine.params import SamplingParams

    not_supported_yet(args, "beams")
    SamplingParams(**{name: value for name, value in _given(args).items() if value is not None})


def sampling_params(llm: LLM, args: argparse.Namespace) -> SamplingParams:
    from plait.engine.streaming import terminal_params

    return terminal_params(llm, **_given(args))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
    return {name: getattr(args, name) for name in names}
