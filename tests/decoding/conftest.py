"""Fixtures of the tests on decoding."""

from __future__ import annotations

from tests.threads import one_thread

__all__ = ["one_thread"]
