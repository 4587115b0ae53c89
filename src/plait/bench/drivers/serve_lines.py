"""The other end of plait.bench.peers.PeerProcess: calls come as lines of JSON, answers go back as lines of JSON.

A driver runs in its engine's own virtual environment, without plait: of ours these files import one another only.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def serve_lines(calls: dict[str, Callable[..., Any]]) -> None:
    """Answer {"call": name, "arguments": {...}} with {"ok": result} or {"error": text} until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print on stdout; their words must not end up between the answers
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = {"ok": calls[message["call"]](**message["arguments"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
