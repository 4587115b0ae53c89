"""Where figures of a run go: a JSONL file always, and services that may fail or hang without the run's noticing."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from plait.errors import UsageError

log = logging.getLogger("plait.training")

Record = Mapping[str, Any]


class Service(Protocol):
    """A place for figures outside the run. Every call may raise or hang."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """The run's log.jsonl: one object a line, {"kind", "step", "tokens", ...}. Its failure is the run's."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._stream.flush()

    def sync(self) -> None:
        """Have the lines on the disk: before a checkpoint says that they were written."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


class Behind:
    """Feeds a service from a thread of its own, with retries.

    A record that fails is tried `tries` times with growing pauses; after `failures` such records in a row, or when
    `capacity` records wait because a call hangs, the service is given up with one line. Nothing here blocks or raises
    in the training thread but `close`, which waits `patience_s` at most.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Service],
        *,
        tries: int = 3,
        pause_s: float = 1.0,
        failures: int = 3,
        capacity: int = 1_000,
        patience_s: float = 10.0,
    ) -> None:
        self.name = name
        self.given_up = False
        self._make, self._tries, self._pause_s, self._failures = make, tries, pause_s, failures
        self._patience_s = patience_s
        self._records: queue.Queue[Record | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name=f"log-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        if self.given_up:
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._give_up("it takes no records any more")

    def close(self) -> None:
        """Let what waits be written, for a while."""
        deadline = time.monotonic() + self._patience_s
        try:
            self._records.put(None, timeout=0 if self.given_up else self._patience_s)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self.given_up:
            self._give_up("it did not finish in time")

    def _run(self) -> None:
        service: Service | None = None
        failed = 0
        while (record := self._records.get()) is not None:
            if self.given_up:
                continue
            error: Exception | None = None
            for attempt in range(self._tries):
                try:
                    service = service or self._make()
                    service.write(record)
                    error = None
                    break
                except Exception as problem:  # whatever a service raises is no reason to lose a run
                    error = problem
                    if attempt + 1 < self._tries:
                        time.sleep(self._pause_s * 2**attempt)
            failed = 0 if error is None else failed + 1
            if failed >= self._failures:
                self._give_up(f"{type(error).__name__}: {error}")
        if service is not None and not self.given_up:
            try:
                service.close()
            except Exception as problem:
                self._give_up(f"{type(problem).__name__}: {problem}")

    def _give_up(self, why: str) -> None:
        if not self.given_up:
            self.given_up = True
            log.warning("logging to %s is given up (%s); the run goes on, and log.jsonl has everything", self.name, why)


class TensorBoard:
    def __init__(self, run: Path, name: str, config: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """Weights & Biases, and trackio, which has its interface."""

    module = "wandb"

    def __init__(self, run: Path, name: str, config: Record) -> None:
        from importlib import import_module

        self._api: Any = import_module(self.module)
        self._api.init(project="plait", name=name, config=dict(config))

    def write(self, record: Record) -> None:
        self._api.log(numbers(record), step=record["step"])

    def close(self) -> None:
        self._api.finish()


class WeightsAndBiases(_Tracker):
    pass


class Trackio(_Tracker):
    module = "trackio"


SERVICES: dict[str, tuple[str, Callable[[Path, str, Record], Service]]] = {
    # name in the recipe: the package that it needs, how it is made
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "trackio": ("trackio", Trackio),
}


def open_services(names: tuple[str, ...], run: Path, config: Record) -> list[Behind]:
    """The services of a recipe. Raises UsageError for one that is unknown or not installed."""
    opened = []
    for name in names:
        if name not in SERVICES:
            raise UsageError(f"log.services: {name!r:.40} is unknown: choose {', '.join(SERVICES)}")
        package, make = SERVICES[name]
        if find_spec(package) is None:
            raise UsageError(f"log.services: {name} is not installed: pip install {package}, or leave it out")
        opened.append(Behind(name, lambda make=make: make(run, run.name, config)))  # type: ignore[misc]
    return opened


def numbers(record: Record, prefix: str = "") -> dict[str, float]:
    """The numbers of a record, nested ones by path: {"train/loss": ..., "train/routing/0/load_entropy": ...}."""
    prefix = prefix or f"{record.get('kind', 'run')}/"
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step":
            found[f"{prefix}{key}"] = float(value)
    return found
