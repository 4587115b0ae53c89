"""Standard streams that are closed, full or of a narrow encoding: their failures as lines and statuses, not traces."""

from __future__ import annotations

import os
import sys
from typing import Any

from plait.errors import UsageError


def prepare_streams() -> None:
    """Make the standard streams safe to use. Raises UsageError where standard output is closed.

    The numbers of closed ones are taken by the null device, so that no file opened later gets them. A closed
    sys.stdin stays None for `need_stdin`; without a standard error messages are lost and the status remains.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (open until the end)
    if sys.stdout is None:
        raise UsageError("standard output is closed: redirect it to a file, or to /dev/null")
    # A model's text may hold characters that the terminal's encoding lacks: replace them instead of failing.
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def need_stdin() -> None:
    """UsageError where standard input is closed."""
    if sys.stdin is None:
        raise UsageError("standard input is closed: redirect it from a file")


def flush_error(stream: Any) -> OSError | None:
    """Why what is buffered for a standard stream cannot be written, None if it can.

    What is left then goes to the null device: it must not fail once more at exit.
    """
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return error
    return None


def complain(line: str) -> None:
    """A line on standard error; where that cannot be written, nobody is there to be told."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        flush_error(sys.stderr)
