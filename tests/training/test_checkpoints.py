"""Checkpoints: whole or not there, damaged ones named, the best kept; run directories, their lock and their log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError, TrainingError, UsageError
from plait.training import checkpoints
from plait.training.run import RunDirectory
from plait.weights.locate import locate
from plait.weights.runs import directory_of, model_of_run, steps_of


def write(text: str) -> Any:
    def fill(directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_text(text)

    return fill


def state(step: int, best: int | None = None) -> dict[str, Any]:
    return {"step": step, "tokens": step * 10, "best": None if best is None else {"step": best, "loss": 1.0}}


def a_run(path: Path, *steps: int, best: int | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text("seed: 0\n")
    for step in steps:
        checkpoints.save(path, step, state(step, best), write("weights " * step))
    return path


def test_a_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    run = a_run(tmp_path, 3, 12)
    found = checkpoints.last_good(run, pytest.fail)
    assert found is not None and (found.step, found.state) == (12, state(12))
    assert (found.path / "model.safetensors").read_text() == "weights " * 12
    assert checkpoints.last_good(a_run(tmp_path / "new"), pytest.fail) is None


@pytest.mark.parametrize("fault", ["shorter", "changed", "missing", "no marker", "marker"])
def test_a_damaged_last_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, fault: str) -> None:
    run = a_run(tmp_path, 3, 12)
    last = directory_of(run, 12)
    weights = last / "model.safetensors"
    said = {
        "shorter": "model.safetensors has 10 of 96 bytes",
        "changed": "checksum of model.safetensors",
        "missing": "model.safetensors is missing",
        "no marker": "not finished",
        "marker": "COMPLETE",
    }[fault]
    if fault == "shorter":
        os.truncate(weights, 10)
    elif fault == "changed":
        weights.write_text("Weights " * 12)
    elif fault == "missing":
        weights.unlink()
    elif fault == "no marker":
        (last / "COMPLETE").unlink()
    else:
        (last / "COMPLETE").write_text('{"files": 3}')
    warned: list[str] = []
    found = checkpoints.last_good(run, warned.append)
    assert found is not None and found.step == 3
    assert (
        len(warned) == 1
        and str(last) in warned[0]
        and said in warned[0]
        and "checkpoint before it is used" in warned[0]
    )
    # Going on from there writes the damaged one anew.
    checkpoints.save(run, 12, state(12), write("new"))
    assert checkpoints.damage(last) is None and (last / "model.safetensors").read_text() == "new"


def test_a_run_none_of_whose_checkpoints_is_whole_is_not_begun_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path, 3, 12)
    for step in (3, 12):
        (directory_of(run, step) / "model.safetensors").write_text("")
    with pytest.raises(TrainingError, match="none of its 2 checkpoints is whole"):
        checkpoints.last_good(run, lambda text: None)


def test_a_save_that_fails_leaves_the_earlier_ones_and_no_rest(tmp_path: Path) -> None:
    run = a_run(tmp_path, 3)

    def fail(directory: Path) -> None:
        write("half")(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(run, 12, state(12), fail)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000003"]
    assert checkpoints.damage(directory_of(run, 3)) is None


FULL = """
import resource, signal, sys
from pathlib import Path
from plait.training import checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
def fill(directory):
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("x" * 10_000)
try:
    checkpoints.save(Path(sys.argv[1]), 12, {"step": 12}, fill)
except OSError as error:
    print(error.strerror)
"""


def test_where_the_system_refuses_to_write_more_nothing_is_lost(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: a real refusal by the system in the middle of a file."""
    run = a_run(tmp_path, 3)
    done = subprocess.run([sys.executable, "-c", FULL, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "File too large"
    assert steps_of(run) == [3] and len(list((run / "checkpoints").iterdir())) == 1


def test_the_last_k_and_the_best_are_kept(tmp_path: Path) -> None:
    run = a_run(tmp_path, 1, 2, 3, 4, 5, best=2)
    checkpoints.prune(run, 2, 2)
    assert steps_of(run) == [2, 4, 5]
    checkpoints.prune(run, 1, None)
    assert steps_of(run) == [5]


def test_a_run_stands_for_its_best_or_its_last_checkpoint(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", 2, 4)
    assert locate(run) == directory_of(run, 4)
    assert locate(a_run(run, 5, best=2)) == directory_of(run, 2)
    os.truncate(directory_of(run, 2) / "model.safetensors", 1)  # the best one damaged: the last
    assert locate(run) == directory_of(run, 5)
    (directory_of(run, 5) / "COMPLETE").unlink()
    assert model_of_run(run) == directory_of(run, 4)
    empty = a_run(tmp_path / "empty")
    (empty / "checkpoints").mkdir()
    with pytest.raises(TrainingError, match="no whole checkpoint yet"):
        locate(empty)


# The directory


def test_a_second_process_is_refused_with_the_first_s_number(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from plait.training.run import RunDirectory; RunDirectory(Path({str(tmp_path)!r}))"
    )
    with RunDirectory(tmp_path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1 and f"process {os.getpid()} is training here" in done.stderr
        with pytest.raises(TrainingError, match=f"process {os.getpid()} "):
            RunDirectory(tmp_path)
    with RunDirectory(tmp_path):  # free again
        pass


def test_other_directories_are_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="not empty and no training run"):
        RunDirectory(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory(tmp_path / "letter.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["letter.txt"]


def test_the_log_is_cut_to_a_checkpoint(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": kind, "step": step}) for step in (1, 2, 3) for kind in ("train", "valid")]
    with RunDirectory(tmp_path) as run:
        run.cut_log(5)  # there is none yet
        run.log_file.write_text("\n".join(lines) + '\n{"kind": "train", "st')
        run.cut_log(2)
        assert run.log_file.read_text() == "\n".join(lines[:4]) + "\n"
        run.cut_log(0)
        assert run.log_file.read_text() == ""


def test_the_configuration_is_kept(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        assert run.stored_config() is None
        run.store_config({"seed": 3, "model": {"rms_norm_eps": 1e-6, "name": "no"}})
        assert run.stored_config() == {"seed": 3, "model": {"rms_norm_eps": 1e-6, "name": "no"}}
        (tmp_path / "config.yaml").write_text("")
        with pytest.raises(PlaitError, match="damaged"):
            run.stored_config()
