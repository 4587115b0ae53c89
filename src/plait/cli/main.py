"""The program `plait`: a table of sub-commands, each imported only when it is chosen, and one place for errors."""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from plait import __version__
from plait.cli.streams import complain, flush_error, prepare_streams
from plait.errors import PlaitError, UsageError

# name -> the line in `plait --help`. The module plait.cli.<name> has add_arguments(parser), which
# may set its description too, and run(args) -> int.
COMMANDS = {
    "generate": "complete a prompt, or answer it with --chat",
    "chat": "talk with a model in the terminal",
    "serve": "OpenAI-compatible server with a chat page",
    "models": "families, and what a context costs in known models or yours",
    "inspect": "configuration, tensors, tokenizer and memory of a checkpoint",
    "convert": "Hugging Face directory <-> GGUF, with quantisation",
    "verify": "compare a checkpoint with a reference implementation, token by token",
    "train": "train a model from a recipe, or go on with a run",
    "evaluate": "a training run on held-out data: perplexity, BLEU, routing",
    "score": "perplexity and log-probabilities of text",
    "bench": "measurements against a peer in the same run",
}
# Announced commands that do not exist yet; they answer so instead of "unknown".
PLANNED = ("batch", "study")

INTERRUPTED = 130
BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are exceptions of ours, printed like all others."""

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, which ignores a failing write."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, 1 (a failure), 2 (a wrong request), 130 (interrupted)."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace(debug=False)
    handler = _warnings_to_stderr()
    try:
        prepare_streams()
        args = parse(words)
        status = import_module(f"plait.cli.{args.command}").run(args)
    except SystemExit as end:  # --help and --version
        status = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader has gone
        status = BROKEN_PIPE
    except Exception as error:
        if args.debug:
            raise
        status = report_error(error)
    finally:
        logging.getLogger("plait").removeHandler(handler)
    return _flushed(status)


def _flushed(status: int) -> int:
    """The exit status once everything that was printed has been written."""
    unwritten = flush_error(sys.stdout)
    if isinstance(unwritten, BrokenPipeError):
        status = status or BROKEN_PIPE
    elif unwritten is not None:
        status = status or report_error(unwritten)
    flush_error(sys.stderr)
    return status


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line. Only the chosen command's module is imported."""
    parser = Parser(prog="plait", description="Run, serve and study language models.")
    parser.add_argument("--version", action="version", version=f"plait {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, line in COMMANDS.items():
        command = subparsers.add_parser(name, help=line, add_help=name == chosen)
        if name == chosen:
            import_module(f"plait.cli.{name}").add_arguments(command)
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if chosen is not None and chosen not in COMMANDS:
        raise UsageError(_unknown(chosen))
    if chosen is not None:
        _check_flags(subparsers.choices[chosen], words)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help(sys.stderr)
        raise UsageError("no command given")
    return args


def _check_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """UsageError for a misspelt --flag, before anything else is found missing because of it."""
    known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    for word in words[: words.index("--")] if "--" in words else words:
        flag = word.split("=")[0]
        if flag.startswith("--") and len(flag) > 2 and not any(name.startswith(flag) for name in (*known, "--version")):
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{parser.prog} has no flag {flag}{hint} (see {parser.prog} --help)")


def report_error(error: Exception) -> int:
    """Print an error as one line on stderr; returns its exit status."""
    if isinstance(error, PlaitError):
        text, status = str(error), error.exit_status
    elif isinstance(error, OSError) and error.strerror:
        # Of the errors of files, those of a write have no name: it is the output's.
        text, status = f"{error.filename or 'cannot write the output'}: {error.strerror}", 1
    else:
        text, status = f"{type(error).__name__}: {error} (--debug shows where)", 1
    complain(f"plait: error: {' '.join(text.split())}")
    return status


def _unknown(name: str) -> str:
    if name in PLANNED:
        return f"the command {name} does not exist yet"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else f" (commands: {', '.join(COMMANDS)})"
    return f"unknown command {name!r}{hint}"


def _warnings_to_stderr() -> logging.Handler:
    """Warnings of the package, such as an ignored key of a config.json, as lines like the errors."""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("plait: %(levelname)s: %(message)s"))
    logging.getLogger("plait").addHandler(handler)
    return handler


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        record.levelname = record.levelname.lower()
        complain(self.format(record))


if __name__ == "__main__":
    sys.exit(main())
