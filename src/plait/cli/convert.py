"""`plait convert`: a checkpoint as a GGUF file or a Hugging Face directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plait.cli.common import DTYPES, MODEL_HELP, Counter, adapters, add_adapter_flag, print_json, threads
from plait.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write DST: a GGUF file where its name ends in .gguf, else a Hugging Face directory. Nothing stands under that"
        " name before all of it is written."
    )
    parser.add_argument("source", metavar="SRC", help=MODEL_HELP.split(" (")[0])
    parser.add_argument("target", metavar="DST", help="the file or directory to write")
    parser.add_argument(
        "--type",
        metavar="TYPE",
        help="f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, a mix (q4_k_s, q4_k_m, q5_k_s, q5_k_m),"
        " hf, or auto: what the source has (default: auto)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of a directory's tensors (default: auto)")
    add_adapter_flag(parser, "merged into the weights on the way; repeatable")
    parser.add_argument("--shard-size", type=size, metavar="SIZE", help="most bytes of a safetensors file (5GB)")
    parser.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    parser.add_argument("--force", action="store_true", help="replace DST where it exists")
    parser.add_argument("--strict", action="store_true", help="unknown keys of a config.json are errors")
    parser.add_argument("--threads", type=threads, metavar="N", help="CPU threads (default: all that may be used)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document")


def run(args: argparse.Namespace) -> int:
    from plait.engine.adapters import check_adapters
    from plait.plan.recorder import recorded_shapes
    from plait.weights.convert import SHARD_BYTES, convert

    if args.shard_size is not None and args.target.lower().endswith(".gguf"):
        raise UsageError("--shard-size is of a Hugging Face directory; a GGUF file is one file")
    report = convert(
        args.source,
        args.target,
        args.type,
        dtype=None if args.dtype == "auto" else args.dtype,
        adapters=check_adapters(adapters(args)),
        shard_bytes=args.shard_size or SHARD_BYTES,
        tokenizer=not args.no_tokenizer,
        strict=args.strict,
        force=args.force,
        threads=args.threads,
        progress=_bytes_written,
        shapes=recorded_shapes,
    )
    if args.json:
        print_json(report.to_json())
    else:
        print("\n".join(report.lines()))
    return 0


@contextmanager
def _bytes_written(total: int) -> Iterator[Callable[[int], None]]:
    with Counter("bytes written", total) as counter:
        yield counter.advance


def size(text: str) -> int:
    """An argparse type: a number of bytes such as 5GB or 512MiB."""
    from plait.engine.build import parse_bytes

    try:
        value = parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be at least one byte")
    return value
