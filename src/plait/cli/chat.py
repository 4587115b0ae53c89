"""`plait chat`: talk with a model in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plait.cli.common import add_adapter_flag, add_model_argument, add_model_flags, engine_options, load_llm, say
from plait.cli.sampling_flags import add_sampling_flags, check_sampling_flags, sampling_params
from plait.cli.streams import need_stdin
from plait.errors import PlaitError, UsageError

if TYPE_CHECKING:
    from plait.engine.conversation import Conversation

INTERRUPTED_MARK = " [interrupted]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talk with a model. Ctrl-C stops an answer and keeps the conversation; /help lists the commands."
    )
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    add_sampling_flags(parser)
    add_model_flags(parser)
    add_adapter_flag(parser, "the first one answers, /adapter chooses another; repeatable")


def run(args: argparse.Namespace) -> int:
    from plait.engine.conversation import Conversation

    need_stdin()
    check_sampling_flags(args)
    engine_options(args)
    llm = load_llm(args)
    conversation = Conversation(llm, sampling_params(llm, args), args.system)
    conversation.adapter = next(iter(llm.bundle.adapters), None)
    if args.load is not None:
        conversation.load(args.load)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() line editing and history)

        say("/help lists the commands; Ctrl-D ends")
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                if not _command(conversation, line):
                    break
            else:
                _answer(conversation, line)
        except PlaitError as error:
            # Whatever went wrong, the conversation is still there.
            say(f"plait: error: {error}")
    return 0


def _read_line() -> str | None:
    """The next line, None at the end of the input; Ctrl-C at the prompt only drops the line."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt)
        except EOFError:
            if prompt:
                print()
            return None
        except KeyboardInterrupt:
            if not prompt:
                raise
            print()


def _answer(conversation: Conversation, text: str) -> None:
    pieces = conversation.ask(text)
    with _interrupt_flag() as interrupted:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            if interrupted():
                pieces.close()  # type: ignore[attr-defined]
                sys.stdout.write(INTERRUPTED_MARK)
                break
    print(flush=True)
    if sys.stdin.isatty() and conversation.last is not None:
        say(conversation.last.speed_line())


@contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that is read between two tokens: an exception in the middle of a step would break the engine.

    A second Ctrl-C raises KeyboardInterrupt as usual.
    """
    seen = False

    def note(*_: Any) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


def _reset(conversation: Conversation, argument: str) -> None:
    conversation.reset()
    say("the conversation begins anew")


def _system(conversation: Conversation, argument: str) -> None:
    if argument:
        conversation.system = argument
    say(f"system message: {conversation.system or 'none'}")


def _adapter(conversation: Conversation, argument: str) -> None:
    known = conversation.llm.bundle.adapters
    if argument and argument != "none" and argument not in known:
        raise UsageError(f"there is no adapter {argument!r:.60}; loaded: {', '.join(known) or 'none'}")
    if argument:
        conversation.adapter = None if argument == "none" else argument
    say(f"adapter: {conversation.adapter or 'none'}")


def _save(conversation: Conversation, argument: str) -> None:
    conversation.save(_file(argument))
    say(f"saved {len(conversation.turns)} turns to {argument}")


def _load(conversation: Conversation, argument: str) -> None:
    conversation.load(_file(argument))
    say(f"loaded {len(conversation.turns)} turns from {argument}")


def _help(conversation: Conversation, argument: str) -> None:
    for name, (_, line) in COMMANDS.items():
        say(f"{name:<15} {line}")


def _file(argument: str) -> str:
    if not argument:
        raise UsageError("name a file")
    return argument


# What is typed -> what does it and its line in /help. /exit ends the loop and has no function.
COMMANDS: dict[str, tuple[Callable[[Conversation, str], None] | None, str]] = {
    "/reset": (_reset, "forget the turns so far"),
    "/system": (_system, "TEXT: set the system message; without TEXT: show it"),
    "/adapter": (_adapter, "NAME, or none: answer with another loaded adapter; alone: show it"),
    "/save": (_save, "FILE: write the conversation as JSON"),
    "/load": (_load, "FILE: go on with a saved conversation"),
    "/help": (_help, "this list"),
    "/exit": (None, "leave, as Ctrl-D does"),
}


def _command(conversation: Conversation, line: str) -> bool:
    """Carry out a line that begins with a slash; False ends the chat."""
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name}; /help lists them")
    function = COMMANDS[name][0]
    if function is None:
        return False
    function(conversation, argument.strip())
    return True
