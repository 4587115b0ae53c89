"""How a run is shown: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

PLAIN_EVERY_S = 5.0


def step_line(record: dict[str, Any], left_s: float | None) -> str:
    """Step, loss, learning rate, gradient norm, tokens/s, share of peak, time left."""
    loss, norm = record["loss"], record["grad_norm"]
    parts = [
        f"step {record['step']:,}",
        "loss -" if loss is None else f"loss {loss:.4f}",
        f"lr {record['lr']:.2e}",
        "norm -" if norm is None else f"norm {norm:.2f}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"{record['peak_share']:.0%} of peak",
    ]
    if "skipped" in record:
        parts.append(f"skipped: {record['skipped']}")
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """1 h 05 min, 3 min 20 s, 12 s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


class PlainDisplay:
    """Lines on stderr, a step's at most every few seconds (and those of skipped and last steps)."""

    def __init__(self, every_s: float = PLAIN_EVERY_S) -> None:
        self._every_s = every_s
        self._last = float("-inf")

    def step(self, record: dict[str, Any], left_s: float | None) -> None:
        now = time.monotonic()
        if now - self._last >= self._every_s or "skipped" in record or left_s == 0:
            self._last = now
            self.line(step_line(record, left_s))

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def stage(self, what: str, done: int, total: int) -> None:
        """How the data is coming along."""
        now = time.monotonic()
        if now - self._last >= self._every_s:
            self._last = now
            self.line(
                f"{what}: {done:,} of {total:,}" if total > 1 else f"{what} ({done:,})" if done else f"{what} ..."
            )

    def close(self) -> None: ...


class TerminalDisplay:
    """A bar that moves, with lines above it."""

    def __init__(self, total_tokens: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            BarColumn(bar_width=20), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
        )
        self._task = self._progress.add_task("the first step", total=total_tokens)
        self._progress.start()

    def step(self, record: dict[str, Any], left_s: float | None) -> None:
        self._progress.update(self._task, completed=record["tokens"], description=step_line(record, left_s))

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def stage(self, what: str, done: int, total: int) -> None:
        """How the data is coming along."""
        share = f" {done / total:.0%}" if total > 1 else f" ({done:,})" if done else ""
        self._progress.update(self._task, description=f"{what}{share}")

    def close(self) -> None:
        self._progress.stop()


def make_display(total_tokens: int) -> PlainDisplay | TerminalDisplay:
    return TerminalDisplay(total_tokens) if sys.stderr.isatty() else PlainDisplay()
