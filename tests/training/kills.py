"""Kills a small training at random moments and looks whether anything was lost.

    python -m tests.training.kills [KILLS] [SEED]

The run has everything in it that an exact resume must restore: shuffled data, dropout, a mixture with its losses,
Sophia with labels that it draws, samples from the live weights, evaluations, and checkpoints every few steps.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from plait.training.checkpoints import damage
from plait.weights.runs import directory_of, steps_of

TEXT = Path(__file__).parents[1] / "fixtures" / "austen-emma.txt"
STEPS = 60  # or one or two more: rows that are not full hold fewer tokens
RECIPE = """
model: {{model_type: plait_gpt, d_model: 32, n_ctx: 32, n_layers: 2, n_heads: 2, dropout: 0.1, use_moe: true,
  n_experts: 4, top_k: 2, d_expert: 32}}
data: {{sources: [{{path: {text}, per: line}}], splits: {{valid: 0.2}}, context: 32, tokenizer: {{vocab_size: 400}}}}
out: {out}
threads: 1
train: {{tokens: {tokens}, batch_tokens: 256, micro_tokens: 128, precision: fp32}}
optimizer: {{name: sophia}}
checkpoints: {{every_tokens: 1_024, keep_last: 2}}
evaluate: {{every_tokens: 2_048, batches: 2}}
sample: {{every_tokens: 4_096, prompts: [It was], max_tokens: 6}}
"""


@dataclass
class Outcome:
    """killed_at: step of the log's last line at each kill, and whether a checkpoint was then being written."""

    killed_at: list[tuple[int, bool]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def write_recipe(folder: Path, name: str) -> Path:
    """A recipe of a run of some 60 steps of up to 256 tokens."""
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(text=TEXT, out=folder / name, tokens=STEPS * 256))
    return path


def start(recipe: Path) -> subprocess.Popen[bytes]:
    log = recipe.with_suffix(".txt").open("ab")
    with log:
        return subprocess.Popen([sys.executable, "-m", "plait", "train", str(recipe)], stdout=log, stderr=log)


def finish(recipe: Path) -> None:
    """Run a recipe to its end. Raises RuntimeError with what it said where it fails."""
    if start(recipe).wait():
        raise RuntimeError(recipe.with_suffix(".txt").read_text()[-2_000:])


def last_step(run: Path) -> int:
    try:
        lines = (run / "log.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError):
        return 0


def writing(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step-*"))


def kill_once(recipe: Path, rng: random.Random, while_saving: bool) -> tuple[int, bool]:
    """Start a run and kill it (SIGKILL) some steps later, at a random moment of a step or of a save."""
    run = recipe.with_suffix("")
    process = start(recipe)
    begun = last_step(run)
    target = min(STEPS - 8, begun + rng.randint(1, 12))
    while process.poll() is None and last_step(run) < target:
        time.sleep(0.002)
    while while_saving and process.poll() is None and not writing(run):
        pass
    time.sleep(rng.random() * 0.02)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"ended before it was killed: {recipe.with_suffix('.txt').read_text()[-2_000:]}")
    return last_step(run), writing(run)


def differences(run: Path, reference: Path) -> list[str]:
    """What differs between the ends of two runs: weights and optimiser bit by bit, the log line by line."""
    faults = []
    if steps_of(run) != steps_of(reference):
        return [f"checkpoints {steps_of(run)}, not {steps_of(reference)}"]
    for step in steps_of(reference):
        ours, theirs = directory_of(run, step), directory_of(reference, step)
        faults += [f"{ours.name}: {fault}" for fault in (damage(ours),) if fault]
        a, b = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
        faults += [f"step {step}: {name} differs" for name in b if not torch.equal(a[name], b[name])]
        a, b = (torch.load(path / "optimizer.pt", weights_only=True)["state"] for path in (ours, theirs))
        faults += [f"step {step}: state {k} differs" for k in b if not all(torch.equal(a[k][n], b[k][n]) for n in b[k])]
    records = [[json.loads(line) for line in (r / "log.jsonl").read_text().splitlines()] for r in (run, reference)]
    ours_, theirs_ = ([_exact(record) for record in some] for some in records)
    steps = [r["step"] for r in ours_ if r["kind"] == "train"]
    if steps != list(range(1, max(steps_of(reference)) + 1)) or len(steps) < STEPS:
        faults.append(f"the log has gaps or doubles: {steps}")
    if ours_ != theirs_:
        faults.append(f"the logs differ, {len(ours_)} lines for {len(theirs_)}")
    return faults


def _exact(record: dict[str, Any]) -> dict[str, Any]:
    """A line of the log without what depends on the clock on the wall."""
    return {k: v for k, v in record.items() if k not in ("tokens_per_s", "peak_share")}


def kill_and_resume(folder: Path, kills: int, seed: int) -> Outcome:
    """Runs once undisturbed, and once more with so many kills (the run begins anew where 60 steps do not last)."""
    rng = random.Random(seed)
    reference, recipe = write_recipe(folder, "reference"), write_recipe(folder, "killed")
    finish(reference)
    outcome = Outcome()
    run = recipe.with_suffix("")
    while len(outcome.killed_at) < kills:
        outcome.killed_at.append(kill_once(recipe, rng, while_saving=len(outcome.killed_at) % 3 == 2))
        if last_step(run) > STEPS - 12 and len(outcome.killed_at) < kills:
            finish(recipe)
            outcome.faults += differences(run, reference.with_suffix(""))
            shutil.rmtree(run)
    finish(recipe)
    outcome.faults += differences(run, reference.with_suffix(""))
    return outcome


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    os.environ.setdefault("PLAIT_CACHE", tempfile.mkdtemp(prefix="plait-kills-cache-"))
    with tempfile.TemporaryDirectory(prefix="plait-kills-") as folder:
        outcome = kill_and_resume(Path(folder), kills, seed)
    saving = sum(saving for _, saving in outcome.killed_at)
    print("killed after the steps", ", ".join(f"{step}{' (saving)' if s else ''}" for step, s in outcome.killed_at))
    for fault in outcome.faults:
        print("FAULT:", fault)
    print(f"{kills} kills, {saving} of them while a checkpoint was written: {len(outcome.faults)} differences")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
