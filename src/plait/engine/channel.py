"""What crosses the border between the engine process and the process that serves: whole pickled messages on a socket.

Both ends are this package, so the messages are tuples that begin with their kind:

to the engine: ("add", model, Request), ("stop", model, request_id, choice), ("abort", model, request_id),
    ("check", number), ("shutdown",).
from the engine: ("ready", [ModelInfo]), ("failed", error class, message), ("step", [(model, outputs, EngineStats)]),
    ("refused", model, request_id, message, field), ("checked", number, [ModelHealth]), ("terminated",),
    ("broken", message).
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from plait.engine.admission import Limits

HEADER = struct.Struct("<Q")


@dataclass
class ModelInfo:
    """What the serving process must know of a loaded model. lines: what a person is told at start-up. adapters: names
    that requests may choose."""

    name: str
    max_model_len: int
    max_num_seqs: int
    limits: Limits
    default_params: dict[str, Any] = field(default_factory=dict)
    precision: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)


@dataclass
class ModelHealth:
    """integrity: "ok", "busy" (requests are running, nothing was checked) or what is wrong."""

    integrity: str
    num_blocks: int
    num_free_blocks: int


def encode(message: Any) -> bytes:
    """A message as it goes over the socket: its length in 8 bytes, then the pickle."""
    body = pickle.dumps(message, protocol=5)
    return HEADER.pack(len(body)) + body


class Channel:
    """The engine's end. `receive` belongs to one thread, `send` to another. Raises EOFError when the peer is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def send(self, message: Any) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise EOFError("the serving process has gone") from error

    def receive(self) -> Any:
        (length,) = HEADER.unpack(self._read(HEADER.size))
        return pickle.loads(self._read(length))

    def _read(self, count: int) -> bytes:
        try:
            data = self._file.read(count)
        except OSError as error:
            raise EOFError("the serving process has gone") from error
        if len(data) < count:
            raise EOFError("the serving process has gone")
        return data
