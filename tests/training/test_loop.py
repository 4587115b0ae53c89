"""The loop: its clock, its log, exact resume, signals, a full disk, the run as a model."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.errors import TrainingError
from plait.training import checkpoints
from plait.training.config import RunConfig, config_of
from plait.training.loop import Loop, Parts, Summary
from plait.training.precision import choose_precision
from plait.training.run import RunDirectory
from plait.training.schedule import factor
from plait.weights.load import load
from plait.weights.locate import locate
from plait.weights.runs import directory_of, steps_of
from tests.configs import CONFIGS
from tests.training.batches import RandomBatches, random_batch

SHAPE = (4, 16)


class Silent:
    """Keeps the lines; step_hook is called after every step."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.step_hook: Any = lambda record: None

    def step(self, record: dict[str, Any], left_s: float | None) -> None:
        self.step_hook(record)

    def line(self, text: str) -> None:
        self.lines.append(text)


def configuration(out: Path, tokens: int = 500, **changes: Any) -> RunConfig:
    return config_of(
        {
            "model": CONFIGS["qwen2"] | {"initializer_range": 0.05},
            "data": {"sources": [{"path": "not read"}]},
            "out": str(out),
            "train": {"tokens": tokens, "batch_tokens": 64, "micro_tokens": 32},
            "checkpoints": {"every_tokens": 150},
            "evaluate": {"every_tokens": 200},
            **changes,
        }
    )


def go(config: RunConfig, display: Silent | None = None, hook: Any = None, **parts: Any) -> Summary:
    """A run as `plait train` makes it, on random batches, with torch's AdamW."""
    with RunDirectory(Path(config.out)) as run:
        run.store_config({"seed": 0})
        found = checkpoints.last_good(run.path, lambda text: None)
        assert isinstance(config.model, dict)
        decoder = (
            plait.from_config(config.model, seed=config.seed) if found is None else load(found.path, torch.float32)
        )
        decoder.model.layers[0].dropout = 0.2
        given: dict[str, Any] = {
            "decoder": decoder,
            "optimizer": torch.optim.AdamW(decoder.parameters(), lr=1e-2),
            "precision": choose_precision("fp32", "cpu"),
            "train": RandomBatches(SHAPE, 96),
            "valid": [random_batch(SHAPE, 96, seed=77)],
        }
        loop = Loop(config, Parts(**(given | parts)), run, display or Silent(), found=found)
        if hook is not None:
            hook(loop)
        return loop.run()


def records(out: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def test_the_clock_counts_tokens_that_are_no_padding(tmp_path: Path) -> None:
    """Steps until 500 tokens have been seen; the rate follows the tokens at each step's end."""
    config = configuration(tmp_path)
    summary = go(config)
    seen, expected = 0, []
    while seen < 500:
        batch = RandomBatches(SHAPE, 96).at(len(expected))
        assert batch.tokens < batch.ids.numel()  # there is padding
        seen += batch.tokens
        expected.append(seen)
    train = records(tmp_path, "train")
    assert [r["tokens"] for r in train] == expected and [r["step"] for r in train] == [*range(1, len(expected) + 1)]
    assert [r["lr"] for r in train] == [pytest.approx(1e-2 * factor(config.schedule, t, 500)) for t in expected]
    assert (summary.steps, summary.tokens, summary.stopped) == (len(expected), seen, None)
    crossed = [after // 200 > before // 200 or after >= 500 for before, after in zip([0, *expected], expected)]  # noqa: B905
    assert [r["step"] for r in records(tmp_path, "valid")] == [i + 1 for i, c in enumerate(crossed) if c]
    assert summary.best is not None and summary.best["loss"] == min(r["loss"] for r in records(tmp_path, "valid"))


def test_ten_steps_are_five_and_five(tmp_path: Path) -> None:
    """TRN-03: dropout and shuffled batches on; losses, weights and optimiser bit for bit."""
    go(configuration(tmp_path / "straight"))
    out = tmp_path / "halves"
    display = Silent()
    display.step_hook = lambda record: os.kill(os.getpid(), signal.SIGINT) if record["step"] == 5 else None
    first = go(configuration(out), display)
    assert first.stopped == signal.SIGINT and first.steps == 5 and first.checkpoint == directory_of(out, 5)
    torch.manual_seed(12345)
    again = go(configuration(out))
    assert again.stopped is None
    keys = ("kind", "step", "tokens", "loss", "lr", "grad_norm")
    logs = [[[r.get(k) for k in keys] for r in records(tmp_path / name)] for name in ("straight", "halves")]
    assert logs[0] == logs[1] and len(logs[0]) > 10
    end = again.steps
    a, b = (load(directory_of(tmp_path / name, end), torch.float32).state_dict() for name in ("straight", "halves"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert go(configuration(out)).steps == end  # nothing is left to do
    assert len(records(out)) == len(logs[1])


def test_a_damaged_last_checkpoint_costs_its_steps_only(tmp_path: Path) -> None:
    straight = go(configuration(tmp_path / "straight"))
    out = tmp_path / "damaged"
    display = Silent()
    display.step_hook = lambda record: os.kill(os.getpid(), signal.SIGTERM) if record["step"] == 7 else None
    assert go(configuration(out), display).stopped == signal.SIGTERM
    assert steps_of(out)[-1] == 7
    os.truncate(directory_of(out, 7) / "optimizer.pt", 100)
    go(configuration(out))
    assert [r["step"] for r in records(out, "train")] == list(range(1, straight.steps + 1))
    a, b = (load(locate(tmp_path / n), torch.float32).state_dict() for n in ("straight", "damaged"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_tied_weights_stay_one(tmp_path: Path) -> None:
    """TRN-15: one tensor in the file, one parameter after loading and after a step."""
    go(configuration(tmp_path))
    from safetensors import safe_open

    with safe_open(locate(tmp_path) / "model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in file.keys() and "lm_head.weight" not in file.keys()  # noqa: SIM118
    held: list[Loop] = []
    go(configuration(tmp_path, tokens=700), hook=held.append)
    decoder = held[0].parts.decoder
    assert decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()
    assert len([p for group in held[0].parts.optimizer.param_groups for p in group["params"]]) == len(
        dict(decoder.named_parameters())
    )


def test_a_full_disk_fails_a_save_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = checkpoints.save
    saves = []

    def save(run: Path, step: int, *rest: Any) -> Path:
        saves.append(step)
        if len(saves) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(run, step, *rest)

    monkeypatch.setattr(checkpoints, "save", save)
    summary = go(configuration(tmp_path))
    assert summary.checkpoint == directory_of(tmp_path, summary.steps)
    assert f"checkpoint {saves[1]} of {tmp_path} was not saved (No space left on device)" in caplog.text
    monkeypatch.setattr(checkpoints, "save", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(TrainingError, match="could not be saved; make room and repeat"):
        go(configuration(tmp_path / "none"))


def test_training_goes_on_only_with_the_same_data(tmp_path: Path) -> None:
    go(configuration(tmp_path), fingerprint="a")
    with pytest.raises(TrainingError, match="not those that the run was begun with"):
        go(configuration(tmp_path, tokens=900), fingerprint="b")


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    go(configuration(tmp_path))
    path = locate(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    ours = load(path, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.testing.assert_close(ours.logits(ours(ids)), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_loss_falls_on_what_can_be_learnt(tmp_path: Path) -> None:
    class Same:
        def at(self, index: int) -> Any:
            return random_batch(SHAPE, 96, seed=5)

    go(configuration(tmp_path, tokens=3_000), train=Same(), valid=[Same().at(0)])
    losses = [r["loss"] for r in records(tmp_path, "train")]
    assert losses[0] == pytest.approx(4.56, abs=0.3)  # ln 96
    assert losses[-1] < 1.5
    assert records(tmp_path, "valid")[-1]["loss"] < 1.5
