"""Three kills of a training; `make accept` has twenty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.kills import STEPS, kill_and_resume


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at random moments, once while a checkpoint is written."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outcome = kill_and_resume(tmp_path, kills=3, seed=1)
    assert outcome.faults == []
    assert len(outcome.killed_at) == 3 and all(0 <= step < STEPS for step, _ in outcome.killed_at)
