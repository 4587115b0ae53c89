"""`plait bench optimisers` on a tiny model: every side steps, and what is said of state and floor is arithmetic."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch

from plait.bench import optimisers
from plait.bench.optimisers import PASSES, SHAPES, count_runs, measure_optimisers
from plait.bench.report import text_lines
from plait.model.decoder import from_config

TINY = {**SHAPES, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


def test_the_shapes_are_the_studies_reference_size() -> None:
    """24,000 x 512 embedding, 8 layers of 4 x 512 x 512 and 2 x 512 x 2,048, and vectors: 37.5M within a tenth of one
    percent."""
    numbers = sum(p.numel() for p in from_config(SHAPES).parameters())
    matrices = 24000 * 512 + 8 * (4 * 512 * 512 + 2 * 512 * 2048)
    assert matrices == 37_453_824 and 0 < numbers - matrices < 40_000


def test_every_side_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimisers, "read_rate", lambda num_bytes, threads: 1e9)
    runs = []
    threads = torch.get_num_threads()
    report = measure_optimisers(1, 1, TINY, advance=lambda: runs.append(1))
    assert torch.get_num_threads() == threads
    assert len(runs) == count_runs(1)
    rows: dict[str, Any] = {row["task"]: row for row in report["rows"]}
    assert list(rows) == ["adamw", "lion", "mars", "sophia", "muon"]
    assert list(rows["adamw"]["sides"]) == ["plait", "torch fused", "torch foreach"]
    numbers = sum(p.numel() for p in from_config(TINY).parameters())
    for name, multiple in (("adamw", 2), ("lion", 1), ("sophia", 2)):
        held = rows[name]["details"]["state, times the parameters"]
        assert all(multiple <= value < multiple + 0.05 for value in held.values()), name
        floor_ms = PASSES[name] * 4 * numbers / 1e9 * 1e3
        assert rows[name]["limit"]["value"] == pytest.approx(floor_ms, rel=1e-3)
    assert "plait bench optimisers" in text_lines(report)[0]


def test_a_public_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "sophia-opt":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(optimisers, "read_rate", lambda num_bytes, threads: 1e9)
    report = measure_optimisers(1, 1, TINY)
    assert "sophia-opt is not installed: pip install sophia-opt" in report["notes"]
    assert list({row["task"]: row for row in report["rows"]}["sophia"]["sides"]) == ["plait"]
