"""`plait generate`: complete a prompt, or answer it with --chat."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from plait.cli.common import (
    add_adapter_flag,
    add_model_argument,
    add_model_flags,
    engine_options,
    load_llm,
    one_adapter,
    print_json,
    read_text,
    say,
)
from plait.cli.sampling_flags import add_sampling_flags, check_sampling_flags, sampling_params
from plait.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Complete a prompt. The text streams to stdout; speeds are said on stderr."
    add_model_argument(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the prompt from a file, - for standard input")
    prompt.add_argument("--ids", metavar="FILE", help="the prompt as token ids (JSON list, or separated by spaces)")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    parser.add_argument("--system", metavar="TEXT", help="a system message for --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of streaming")
    add_sampling_flags(parser)
    add_model_flags(parser)
    add_adapter_flag(parser, "the text is of the model with it")


def run(args: argparse.Namespace) -> int:
    from plait.engine.prompts import prompt_ids, read_ids

    check_sampling_flags(args)
    engine_options(args)
    one_adapter(args)
    if args.chat and args.ids:
        raise UsageError("--ids is a finished prompt: leave --chat out")
    if args.system is not None and not args.chat:
        raise UsageError("--system needs --chat")
    ids = None if args.ids is None else read_ids(read_text(args.ids), args.ids)
    text = read_text(args.prompt_file) if args.prompt_file else args.prompt
    llm = load_llm(args)
    if ids is None:
        ids = prompt_ids(llm, text, chat=args.chat, system=args.system)
    return _generate(llm, ids, args)


def _generate(llm: Any, ids: list[int], args: argparse.Namespace) -> int:
    from plait.engine.streaming import Generation

    adapter = one_adapter(args)
    generation = Generation(llm, ids, sampling_params(llm, args), adapter)
    for piece in generation:
        if not args.json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if args.json:
        used = {} if adapter is None else {"adapter": adapter}
        print_json({"model": llm.bundle.name, **used, **generation.to_json()})
    else:
        print()
    say(generation.speed_line())
    return 0
