"""HTTP connections that must get to the point: a request's head has to arrive within a time."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 15.0


class HeadTimeoutProtocol(H11Protocol):
    """Closes a connection whose first request's head is not complete HEAD_TIMEOUT_S seconds after it was made, and
    one whose later request's head is not complete so long after its first byte. Between requests uvicorn's own
    `timeout_keep_alive` counts.

    Otherwise heads that were never finished would hold all connections that there may be.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Of asyncio.Protocol."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio.Protocol."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Of uvicorn: a part of the next head may have come during the answer, by pipelining."""
        super().on_response_complete()
        self.loop.call_soon(self._look)

    def _look(self) -> None:
        waits = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        begun = waits and bool(self.conn.trailing_data[0])
        if not waits:
            self._stop_waiting()
        elif begun and self._head_timer is None:
            self._await_head()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
