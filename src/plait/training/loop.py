"""The loop of a run: steps on the token clock, evaluations, samples, checkpoints, and an end at any moment."""

from __future__ import annotations

import logging
import math
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from plait.errors import PlaitError, TrainingError
from plait.model.decoder import Decoder
from plait.training import checkpoints
from plait.training.batch import Batch
from plait.training.config import RunConfig
from plait.training.flops import flops_per_token, measured_peak
from plait.training.live import LiveSampler
from plait.training.logs import Behind, JsonLines
from plait.training.micro import cut, seed_of
from plait.training.precision import Precision
from plait.training.progress import duration
from plait.training.run import RunDirectory
from plait.training.schedule import factor
from plait.training.step import RoutingTerms, StepReport, TrainingStep
from plait.training.validation import validate

log = logging.getLogger("plait.training")

OPTIMIZER, RANDOM = "optimizer.pt", "random.pt"
_PEAK_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BatchSource(Protocol):
    def at(self, index: int) -> Batch:
        """The batch of this number, a pure function of it."""


class Display(Protocol):
    """Who is told how the run goes: `plait.training.progress` has one for terminals and one for plain lines."""

    def step(self, record: dict[str, Any], left_s: float | None) -> None: ...

    def line(self, text: str) -> None: ...


@dataclass
class Parts:
    """What a run is made of. train: its batches by number. valid: held-out batches. languages: names of the batches'
    language numbers. tokenizer: for samples, None where there is none. fingerprint: of the data, which a run that goes
    on must find as it was."""

    decoder: Decoder
    optimizer: torch.optim.Optimizer
    precision: Precision
    train: BatchSource
    valid: list[Batch] = field(default_factory=list)
    languages: tuple[str, ...] = ()
    tokenizer: Any = None
    routing: RoutingTerms | None = None
    fingerprint: str = ""


@dataclass(frozen=True)
class Summary:
    """How a run ended. best: {"step", "loss"} on the validation split. stopped: the signal that ended it early."""

    steps: int
    tokens: int
    loss: float | None
    best: dict[str, Any] | None
    checkpoint: Path | None
    seconds: float
    skipped: dict[str, int]
    stopped: signal.Signals | None = None

    def to_json(self) -> dict[str, Any]:
        stopped = None if self.stopped is None else self.stopped.name
        return asdict(self) | {"checkpoint": str(self.checkpoint or ""), "stopped": stopped}

    def lines(self) -> Iterator[str]:
        """How it ended, in words."""
        last = "" if self.loss is None else f", loss {self.loss:.4f}"
        yield f"{self.steps:,} steps, {self.tokens:,} tokens{last}, {duration(self.seconds)} in this process"
        if self.best is not None:
            loss, step = self.best["loss"], self.best["step"]
            yield f"best validation loss {loss:.4f} (perplexity {math.exp(min(loss, 700.0)):.2f}) at step {step:,}"
        skipped = ", ".join(f"{count:,} ({why})" for why, count in self.skipped.items() if count)
        if skipped:
            yield f"skipped steps: {skipped}"
        yield f"checkpoint: {self.checkpoint}" if self.checkpoint else "no checkpoint was saved"
        if self.stopped is not None:
            yield f"ended by {self.stopped.name}; the same command goes on"


class Loop:
    """Trains from wherever the run stands to its end, or to a signal.

    found: the checkpoint to go on from, whose weights the decoder already has.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        run: RunDirectory,
        display: Display,
        services: list[Behind] | None = None,
        found: checkpoints.Found | None = None,
    ) -> None:
        self.config, self.parts, self.run_directory, self.display = config, parts, run, display
        self.services = services or []
        self.step_number = self.tokens = 0
        self.best: dict[str, Any] | None = None
        self.last_loss: float | None = None
        self._saved: Path | None = None if found is None else found.path
        self._signal: signal.Signals | None = None
        self._sampler: LiveSampler | None = None
        t = config.train
        self.stepper = TrainingStep(
            parts.decoder,
            parts.optimizer,
            parts.precision,
            clip=t.clip,
            seed=config.seed,
            patience=t.patience,
            routing=parts.routing,
        )
        if found is not None:
            self._restore(found)
        run.cut_log(self.step_number)

    def run(self) -> Summary:
        """Make the remaining steps. Raises TrainingError for a run that cannot go on, or whose end cannot be saved."""
        start = time.perf_counter()
        self._speed = _Speed(self.config, self.parts)
        self._log = JsonLines(self.run_directory.log_file)
        self.parts.decoder.train()
        total = self.config.train.tokens
        try:
            with self._signals():
                while self.tokens < total and self._signal is None:
                    self._one_step(total)
                if self._unsaved and not self._save() and self.tokens >= total:
                    raise TrainingError(
                        f"{self.run_directory.path}: the trained weights could not be saved; make room and repeat the"
                        " command, which goes on from the last checkpoint"
                    )
        finally:
            self._log.close()
            for service in self.services:
                service.close()
        seconds = time.perf_counter() - start
        return Summary(
            self.step_number,
            self.tokens,
            self.last_loss,
            self.best,
            self._saved,
            seconds,
            dict(self.stepper.skipped),
            self._signal,
        )

    # One step and what follows it

    def _one_step(self, total: int) -> None:
        config, before = self.config, self.tokens
        batch = self.parts.train.at(self.step_number)
        if not batch.tokens:
            raise TrainingError(f"batch {self.step_number} of the data is empty")
        self._speed.begin()
        after = before + batch.tokens
        rate = factor(config.schedule, after, total)
        micro = [b.to(self.parts.decoder.device) for b in cut(batch, config.train.micro_tokens)]
        report = self.stepper(micro, self.step_number, rate)
        self.step_number, self.tokens = self.step_number + 1, after
        self._speed.end(report, batch)
        if report.skipped is None:
            self.last_loss = report.loss
        self._record(report, rate, total)
        improved = False
        if self._crossed(before, config.every(config.evaluate)) and self.parts.valid:
            improved = self._evaluate()
        if self._crossed(before, config.sample.every_tokens):
            self._sample()
        if improved or self._crossed(before, config.every(config.checkpoints)):
            self._save()

    def _crossed(self, before: int, every: int) -> bool:
        """Whether a multiple of `every` tokens, or the end, lies in the step. Of the clock alone, so that a resumed run
        does the same."""
        if not every:
            return False
        total = self.config.train.tokens
        return before // every != self.tokens // every or self.tokens >= total

    def _record(self, report: StepReport, rate: float, total: int) -> None:
        lr = self.parts.optimizer.param_groups[0]["initial_lr"] * rate
        record: dict[str, Any] = {
            "kind": "train",
            "step": self.step_number,
            "tokens": self.tokens,
            "loss": report.loss if math.isfinite(report.loss) else None,
            "lr": lr,
            "grad_norm": report.grad_norm if math.isfinite(report.grad_norm) else None,
            **self._speed.figures(),
        }
        if report.skipped is not None:
            record["skipped"] = report.skipped
        if report.scale is not None:
            record["loss_scale"] = report.scale
        if report.curvature:
            record["curvature"] = True
        unclipped = getattr(self.parts.optimizer, "unclipped_share", None)  # Sophia's
        if unclipped is not None and report.skipped is None:
            record["unclipped_share"] = unclipped()
        if report.routing:
            record["routing"] = report.routing
        self.display.step(record, self._speed.seconds_left(total - self.tokens))
        if self.step_number % self.config.log.every_steps == 0 or report.skipped or self.tokens >= total:
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        self._log.write(record)
        for service in self.services:
            service.write(record)

    def _evaluate(self) -> bool:
        """Evaluate; whether this is the best so far."""
        figures = validate(self.parts.decoder, self.parts.valid, self.parts.precision, self.parts.languages)
        self._write({"kind": "valid", "step": self.step_number, "tokens": self.tokens, **figures})
        loss = figures["loss"]
        if loss is None or not math.isfinite(loss):
            self.display.line(
                f"step {self.step_number}: the validation split has no loss ({figures['targets']} targets)"
            )
            return False
        improved = self.best is None or loss < self.best["loss"]
        if improved:
            self.best = {"step": self.step_number, "loss": loss}
        note = ", the best so far" if improved else ""
        self.display.line(
            f"step {self.step_number}: validation loss {loss:.4f}, perplexity {figures['perplexity']:.2f}{note}"
        )
        return improved

    def _sample(self) -> None:
        config = self.config.sample
        if self._sampler is None:
            self._sampler = LiveSampler(self.parts.decoder, self.parts.tokenizer, config.max_tokens, config.temperature)
        try:
            texts = self._sampler.sample(config.prompts, seed_of(self.config.seed, self.step_number, "samples"))
        except PlaitError as error:  # a text to look at is not worth a run
            log.warning("step %d: no samples: %s", self.step_number, error)
            return
        self._log.write({"kind": "sample", "step": self.step_number, "tokens": self.tokens, "samples": texts})
        for text in texts:
            self.display.line(f"step {self.step_number}: {text['prompt']!r} -> {text['text']!r}")

    # Checkpoints

    @property
    def _unsaved(self) -> bool:
        return self.step_number > 0 and self._saved_step != self.step_number

    @property
    def _saved_step(self) -> int | None:
        return None if self._saved is None else int(self._saved.name.removeprefix("step-"))

    def _save(self) -> bool:
        """Save a checkpoint; a full disk is said and loses nothing that there was. Whether it was saved."""
        path = self.run_directory.path
        state = {
            "step": self.step_number,
            "tokens": self.tokens,
            "data_index": self.step_number,
            "best": self.best,
            "loss": self.last_loss,
            "steps": self.stepper.state_dict(),
            "data": self.parts.fingerprint,
        }
        self._log.sync()
        try:
            self._saved = checkpoints.save(path, self.step_number, state, self._write_files)
        except (OSError, SafetensorError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            log.warning("checkpoint %d of %s was not saved (%s); earlier ones are whole", self.step_number, path, why)
            return False
        checkpoints.prune(path, self.config.checkpoints.keep_last, None if self.best is None else self.best["step"])
        return True

    def _write_files(self, directory: Path) -> None:
        self.parts.decoder.save_pretrained(directory)
        torch.save(self.parts.optimizer.state_dict(), directory / OPTIMIZER)
        torch.save(_random_states(), directory / RANDOM)

    def _restore(self, found: checkpoints.Found) -> None:
        state = found.state
        if state["data"] != self.parts.fingerprint:
            raise TrainingError(
                f"{self.run_directory.path}: the training data are not those that the run was begun with: restore the"
                " files, or begin a new run with out=ANOTHER"
            )
        self.step_number, self.tokens = int(state["step"]), int(state["tokens"])
        self.best, self.last_loss = state["best"], state["loss"]
        self.stepper.load_state_dict(state["steps"])
        device = self.parts.decoder.device
        saved = torch.load(found.path / OPTIMIZER, map_location=device, weights_only=True)
        self.parts.optimizer.load_state_dict(saved)
        _set_random_states(torch.load(found.path / RANDOM, weights_only=True))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step that is being made; the second one ends the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.getsignal(kind) for kind in kinds}

        def note(number: int, frame: Any) -> None:
            self._signal = signal.Signals(number)
            self.display.line(f"{self._signal.name}: saving a checkpoint after this step, then the end")
            for kind in kinds:
                signal.signal(kind, before[kind])

        for kind in kinds:
            signal.signal(kind, note)
        try:
            yield
        finally:
            for kind in kinds:
                signal.signal(kind, before[kind])


class _Speed:
    """Tokens per second, of the last step in the log and smoothed for the time left, and the share of the peak."""

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self._device = parts.decoder.device
        self._peak = measured_peak(str(self._device), _PEAK_DTYPES[parts.precision.name])
        self._config = parts.decoder.config
        self._rate = 0.0
        self._smooth: float | None = None
        self._share = 0.0
        self._begin = self._end = time.perf_counter()

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self, report: StepReport, batch: Batch) -> None:
        seconds = time.perf_counter() - self._begin
        self._rate = report.tokens / seconds
        # Evaluations and checkpoints between steps are part of the time that is left.
        now = time.perf_counter()
        whole = report.tokens / (now - self._end)
        self._end = now
        self._smooth = whole if self._smooth is None else 0.9 * self._smooth + 0.1 * whole
        length = report.tokens / batch.ids.shape[0]
        needed = flops_per_token(self._config, length, report.targets / max(1, report.tokens))
        self._share = needed * self._rate / self._peak

    def figures(self) -> dict[str, float]:
        return {"tokens_per_s": round(self._rate, 1), "peak_share": round(self._share, 4)}

    def seconds_left(self, tokens: int) -> float | None:
        return None if not self._smooth else max(0, tokens) / self._smooth


def _random_states() -> dict[str, Any]:
    """Nothing in plait's training reads a global generator; what a user adds to it may."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_states(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
