"""Logs: the JSONL file, and services that fail, hang, or come back."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.errors import UsageError
from plait.training import logs
from plait.training.logs import Behind, JsonLines, numbers, open_services

RECORDS: list[dict[str, Any]] = [{"kind": "train", "step": step, "loss": 1.0 / step} for step in range(1, 6)]


class Service:
    """Fails so often before it works; may hang at a record."""

    def __init__(self, failures: int = 0, hang: threading.Event | None = None) -> None:
        self.failures, self.hang = failures, hang
        self.seen: list[Mapping[str, Any]] = []
        self.closed = False

    def write(self, record: Mapping[str, Any]) -> None:
        if self.hang is not None:
            self.hang.wait(60)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no network")
        self.seen.append(record)

    def close(self) -> None:
        self.closed = True


def feed(service: Service, **options: Any) -> Behind:
    behind = Behind("somewhere", lambda: service, pause_s=0.001, **options)
    for record in RECORDS:
        behind.write(record)
    return behind


def test_lines_are_json_and_there_at_once(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    log = JsonLines(file)
    log.write({"step": 1, "text": "zwölf"})
    assert json.loads(file.read_text()) == {"step": 1, "text": "zwölf"}
    log.sync()
    log.close()
    log = JsonLines(file)
    log.write({"step": 2})
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]


def test_a_service_gets_everything_in_order_through_some_failures() -> None:
    service = Service(failures=2)
    feed(service).close()
    assert service.seen == RECORDS and service.closed


def test_a_service_that_keeps_failing_is_given_up_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(failures=10_000)
    with caplog.at_level(logging.WARNING):
        behind = feed(service)
        behind.close()
    assert behind.given_up and service.seen == []
    (said,) = caplog.messages
    assert "somewhere is given up (ConnectionError: no network)" in said and "the run goes on" in said


def test_a_service_that_cannot_be_made_is_given_up() -> None:
    def make() -> Service:
        raise RuntimeError("no account")

    behind = Behind("somewhere", make, pause_s=0.001)
    for record in RECORDS:
        behind.write(record)
    behind.close()
    assert behind.given_up


def test_a_service_that_hangs_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    try:
        with caplog.at_level(logging.WARNING):
            behind = feed(Service(hang=release), capacity=2, patience_s=0.05)
            behind.close()
        assert behind.given_up and len(caplog.messages) == 1
        other = Behind("elsewhere", lambda: Service(hang=release), patience_s=0.05)
        other.write(RECORDS[0])
        start = time.monotonic()
        other.close()
        assert other.given_up and time.monotonic() - start < 30  # the hanging call takes 60
    finally:
        release.set()


def test_numbers_of_a_record_by_path() -> None:
    record = {"kind": "train", "step": 3, "loss": 2, "skipped": "x", "routing": {"0": {"entropy": 0.5, "load": [1]}}}
    assert numbers(record) == {"train/loss": 2.0, "train/routing/0/entropy": 0.5}


def test_services_that_are_unknown_or_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'tensorbord' is unknown: choose tensorboard, wandb"):
        open_services(("tensorbord",), tmp_path, {})
    monkeypatch.setitem(logs.SERVICES, "wandb", ("no_such_package", logs.WeightsAndBiases))
    with pytest.raises(UsageError, match="wandb is not installed: pip install no_such_package"):
        open_services(("wandb",), tmp_path, {})


class FakeTracker:
    """In place of wandb and trackio, whose calls the adapter makes: init, log with a step, finish."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def log(self, values: Any, step: int) -> None:
        self.calls.append(("log", (values, step)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_trackers_are_called_as_they_want(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    service = logs.Trackio(tmp_path, "a run", {"seed": 1})
    service.write({"kind": "valid", "step": 7, "loss": 2.5})
    service.close()
    assert fake.calls == [
        ("init", {"project": "plait", "name": "a run", "config": {"seed": 1}}),
        ("log", ({"valid/loss": 2.5}, 7)),
        ("finish", None),
    ]
