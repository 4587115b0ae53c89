"""How long a request may take, all its parts together, and whether anybody still waits for it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from plait.server.errors import ApiError


class Deadline:
    """Begins to run when it is made. timeout_s: None for no deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._start_s = time.monotonic()

    def left_s(self) -> float | None:
        """Seconds that are left, at least 0; None without a deadline."""
        return None if self._timeout_s is None else max(self._timeout_s - (time.monotonic() - self._start_s), 0.0)

    def error(self) -> ApiError:
        """What a client is told when it has passed."""
        return ApiError(
            504, f"the request did not end within {self._timeout_s:g} s (--request-timeout)", code="timeout"
        )


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has closed the connection (the body must have been read)."""
    while (await receive())["type"] != "http.disconnect":
        pass
