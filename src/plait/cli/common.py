"""What the commands share: the flags of everything that loads a model, progress, and JSON output."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.streams import need_stdin
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.engine.llm import LLM

DTYPES = ("auto", "bf16", "fp16", "fp32")
KV_DTYPES = (*DTYPES, "q8_0")
MODEL_HELP = "a GGUF file, a directory with config.json, or hf:OWNER/NAME (default: SmolLM2-135M-Instruct)"


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The optional positional MODEL; None is the embedded default."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of commands that load weights but need no engine: --device, --dtype, --threads, --strict."""
    parser.add_argument("--device", default="cpu", type=device, help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="what weights are kept in (auto: as stored; the reference plan expands)",
    )
    parser.add_argument("--threads", type=threads, metavar="N", help="CPU threads (default: all that may be used)")
    parser.add_argument("--strict", action="store_true", help="unknown keys of a config.json are errors")


def add_adapter_flag(parser: argparse.ArgumentParser, help: str) -> None:
    """--adapter, repeatable; `adapters` reads it."""
    parser.add_argument("--adapter", action="append", metavar="[NAME=]PATH", help=f"a LoRA adapter (peft): {help}")


def adapters(args: argparse.Namespace) -> dict[str, str]:
    """Name -> directory from --adapter, {} where it was not given or the command has no such flag. UsageError."""
    from plait.engine.adapters import parse_adapter

    found: dict[str, str] = {}
    for text in getattr(args, "adapter", None) or []:
        name, path = parse_adapter(text)
        if name in found:
            raise UsageError(f"two adapters would be called {name}: write --adapter NAME={path}")
        found[name] = path
    return found


def one_adapter(args: argparse.Namespace) -> str | None:
    """The name of the only adapter of a command that uses one. UsageError where several are given."""
    names = list(adapters(args))
    if len(names) > 1:
        raise UsageError(f"--adapter is given {len(names)} times, but one prompt has one adapter: give it once")
    return names[0] if names else None


def add_model_flags(parser: argparse.ArgumentParser, sampling: bool = True) -> None:
    """The flags of every command that runs the engine; `engine_options` reads them.

    sampling: whether the command samples, so that the checkpoint's sampling defaults matter.
    """
    add_load_flags(parser)
    group = parser.add_argument_group("engine")
    group.add_argument("--max-model-len", type=positive, metavar="N", help="longest context (default: the model's own)")
    group.add_argument("--kv-memory", metavar="SIZE", help="memory for keys and values, such as 2GiB")
    add_plan_flags(group)
    if sampling:
        group.add_argument(
            "--run-ahead",
            type=milliseconds,
            metavar="MS",
            help="how long greedy decoding may go on before anything else is looked at; 0: one step (default: 40)",
        )
        group.add_argument(
            "--generation-config",
            default="auto",
            choices=("auto", "none"),
            help="auto: the checkpoint's own sampling defaults apply where no flag is given (default: auto)",
        )


def add_plan_flags(parser: Any) -> None:
    """--plan and --kv-dtype, for a parser or a group of it."""
    parser.add_argument("--kv-dtype", default="auto", choices=KV_DTYPES, help="default: auto")
    parser.add_argument(
        "--plan",
        default="auto",
        choices=("auto", "native", "reference"),
        help="native: C++ kernels on packed weights, reference: torch (default: auto, native where it can be)",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM` and `build_engine` from the common flags."""
    options = {
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        "strict": args.strict,
        "max_model_len": args.max_model_len,
        "kv_memory": args.kv_memory,
        "kv_dtype": args.kv_dtype,
        "plan": args.plan,
    }
    if lora := adapters(args):
        options["adapters"] = lora
    if "generation_config" in args:
        options["generation_config"] = args.generation_config
    if getattr(args, "run_ahead", None) is not None:
        options["run_ahead_s"] = args.run_ahead / 1000
    return options


def load_llm(args: argparse.Namespace, **options: Any) -> LLM:
    """The model of args.model with an engine in this process; what was loaded and what fits is said on stderr."""
    options = {**engine_options(args), **options}
    with progress("loading the model"):
        from plait.engine.llm import LLM
        from plait.weights.locate import locate

        # A wrong path is told before torch is imported.
        llm = LLM(locate(args.model), **options)
    for line in llm.bundle.lines:
        say(line)
    return llm


def load_decoder(args: argparse.Namespace) -> tuple[Any, Any]:
    """(decoder, tokenizer) of args.model for commands that need no engine; adapters are merged into its weights."""
    from plait.engine.adapters import check_adapters

    lora = check_adapters(adapters(args))
    with progress("loading the model"):
        import torch

        from plait.kernels.native import usable_cpus
        from plait.text.tokenizer import load_tokenizer
        from plait.weights.checkpoint import open_checkpoint
        from plait.weights.load import load
        from plait.weights.merge import merge_adapter

        if args.device.startswith("cpu"):
            torch.set_num_threads(args.threads or usable_cpus())
        checkpoint = open_checkpoint(args.model, args.strict)
        decoder = load(checkpoint, args.dtype, args.device, args.strict)
        tokenizer = load_tokenizer(checkpoint.path)
        checkpoint.source.close()
        for path in lora.values():
            merge_adapter(decoder, path)
    for line in decoder.load_report.lines():
        say(line)
    return decoder, tokenizer


def load_forward(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """(loaded model, tokenizer, forward) of args.model for commands that score ids; --plan chooses the forward."""
    from plait.engine.adapters import check_adapters, load_adapters
    from plait.engine.build import check_options, settle_kv_dtype
    from plait.engine.loading import choose_plan, load_model
    from plait.engine.score import window_size
    from plait.engine.score_forward import DecoderForward, Forward, PlanForward

    one_adapter(args)
    lora = check_adapters(adapters(args))
    options = {name: getattr(args, name) for name in ("dtype", "device", "threads", "strict", "plan")}
    check_options(**options, kv_dtype=args.kv_dtype)
    if args.kv_dtype != "auto" and choose_plan(args.plan, args.device) == "reference":
        raise UsageError(f"--kv-dtype {args.kv_dtype}: the reference plan scores without a cache; leave it out")
    with progress("loading the model"):
        loaded = load_model(args.model, generation_config="none", **options)
        forward: Forward
        adapter = next(iter(load_adapters(lora, loaded)), None)
        if loaded.native is None:
            forward = DecoderForward(loaded.decoder, adapter)
        else:
            window = min(window_size(args.window, loaded.config.max_positions), loaded.config.max_positions)
            forward = PlanForward(loaded, window, settle_kv_dtype(args.kv_dtype, loaded), adapter)
    for line in loaded.report.lines() if loaded.report else []:
        say(line)
    return loaded, loaded.tokenizer, forward


def not_supported_yet(args: argparse.Namespace, *names: str) -> None:
    """UsageError for the first of these flags that was given."""
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is not supported yet; leave it out")


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be a whole number of at least 1")
    return int(text)


def milliseconds(text: str) -> float:
    """An argparse type: a time of up to a minute, in ms."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be a number of milliseconds, 0 to 60000")
    return value


def device(text: str) -> str:
    """An argparse type: the name of a torch device."""
    from plait.engine.loading import check_device

    try:
        check_device(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def threads(text: str) -> int:
    """An argparse type: a number of threads that an operating system may give."""
    from plait.engine.build import MAX_THREADS

    if positive(text) > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be at most {MAX_THREADS}")
    return int(text)


def read_text(name: str) -> str:
    """The text of a file, or of standard input for "-". Raises UsageError for what cannot be read as UTF-8."""
    if name == "-":
        need_stdin()
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text (byte {error.start}); convert the file first") from None


def print_json(document: Any) -> None:
    """The one JSON document of a command with --json."""
    print(json.dumps(document, ensure_ascii=False, indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns: the first to the left, the others to the right where they are numbers."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    numeric = [i > 0 and all(row[i][:1].isdigit() or row[i] in ("-", "") for row in rows) for i in range(len(header))]
    for line in (header, *rows):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        print("  ".join(cells).rstrip())


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Tell that something is being done: a spinner on a terminal, elsewhere one line when it has taken two seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ..."):
            yield
        return
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    if seconds > 2:
        say(f"{what}: {seconds:.1f} s")


class Counter:
    """Progress over a known total: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._last = time.perf_counter()
        self._bar: Any = None

    def __enter__(self) -> Counter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """`count` more of the total are done."""
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], count)
        elif time.perf_counter() - self._last > 10:
            self._last = time.perf_counter()
            say(f"{self._what}: {self._done:,} of {self._total:,}")
