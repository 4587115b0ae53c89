"""The configuration of a run: one frozen tree, read from a recipe and checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from plait.errors import ConfigError, UsageError
from plait.training.data.config import DataConfig
from plait.training.precision import PRECISIONS
from plait.training.recipe import apply_overrides, read_recipe
from plait.training.schedule import ScheduleConfig, check_schedule
from plait.training.tree import build_tree, differences, to_plain


@dataclass(frozen=True)
class OptimizerConfig:
    """name: adamw, mars, lion, muon or sophia. lr: learning rate, null for the optimiser's own. options: its other
    hyperparameters (weight_decay, betas, ...)."""

    name: str = "adamw"
    lr: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpertsConfig:
    """Losses of mixtures. balance, z: their coefficients; null: the model configuration's, else 0.01 and 0.001.
    balance_scope: over what the balance loss's means run. bias_update: gamma of the selection bias, once per step."""

    balance: float | None = None
    z: float | None = None
    balance_scope: Literal["micro", "step"] = "micro"
    bias_update: float = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """tokens: non-padding tokens to see in all. batch_tokens: of one step, padding included. micro_tokens: the most
    that go through the model at once, null for the whole step; a matter of memory, not of the result (but for dropout's
    numbers and `experts.balance_scope: micro`). clip: largest norm of the gradients, 0 for none. patience: so many
    steps in a row that are not finite end the run. memory_fraction: of a GPU's memory."""

    tokens: int = 10_000_000
    batch_tokens: int = 16_384
    micro_tokens: int | None = None
    clip: float = 1.0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    patience: int = 10
    memory_fraction: float = 0.85


@dataclass(frozen=True)
class CheckpointConfig:
    """every_tokens: null for twenty in a run. keep_last: how many of the newest stay, beside the best."""

    every_tokens: int | None = None
    keep_last: int = 2


@dataclass(frozen=True)
class EvaluateConfig:
    """Loss on the validation split. every_tokens: null for twenty times in a run, 0 for never. batches: the most of
    them, null for all."""

    every_tokens: int | None = None
    batches: int | None = 50


@dataclass(frozen=True)
class SampleConfig:
    """Texts from the live weights. every_tokens: 0 for none. prompts: what they begin with."""

    every_tokens: int = 0
    prompts: tuple[str, ...] = ("",)
    max_tokens: int = 48
    temperature: float = 0.8


@dataclass(frozen=True)
class LogConfig:
    """every_steps: lines in log.jsonl. services: tensorboard, wandb, trackio."""

    every_steps: int = 1
    services: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunConfig:
    """Everything about a run. out: its directory. model: a config.json dictionary, in which vocab_size may be `auto`,
    or the path of a checkpoint to start from. threads: of the CPU, null for all; the last bits depend on it."""

    model: dict[str, Any] | str
    data: DataConfig
    out: str = ""
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    experts: ExpertsConfig = ExpertsConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    sample: SampleConfig = SampleConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        _at_least(1, "train", self.train, "tokens", "batch_tokens", "patience", "micro_tokens")
        _at_least(0, "train", self.train, "clip")
        _at_least(1, "checkpoints", self.checkpoints, "every_tokens", "keep_last")
        _at_least(0, "evaluate", self.evaluate, "every_tokens")
        _at_least(1, "evaluate", self.evaluate, "batches")
        _at_least(0, "sample", self.sample, "every_tokens", "temperature")
        _at_least(1, "sample", self.sample, "max_tokens")
        _at_least(1, "log", self.log, "every_steps")
        _at_least(0, "experts", self.experts, "balance", "z", "bias_update")
        if not 0 < self.train.memory_fraction <= 1:
            raise ConfigError(f"train.memory_fraction={self.train.memory_fraction} must be above 0 and at most 1")
        assert self.train.precision in PRECISIONS

    def every(self, part: CheckpointConfig | EvaluateConfig) -> int:
        """The distance in tokens of saves or evaluations; 0 for none."""
        return part.every_tokens if part.every_tokens is not None else max(1, self.train.tokens // 20)


# What may differ when a run goes on: nothing that changes the weights, threads apart (their last bits).
FREE = ("out", "threads", "checkpoints", "evaluate", "sample", "log", "device")


def load_config(path: Path, words: Iterable[str] = ()) -> RunConfig:
    """The configuration of a recipe with `key=value` words. Raises ConfigError or UsageError with the key's path."""
    recipe = apply_overrides(read_recipe(path), words)
    config = build_tree(RunConfig, recipe)
    config = config if config.out else replace(config, out=str(Path("runs") / path.stem))
    return _with_absolute_paths(config)


def config_of(plain: Mapping[str, Any], words: Iterable[str] = ()) -> RunConfig:
    """The configuration from what `to_plain` made of one."""
    return build_tree(RunConfig, apply_overrides(plain, words))


def check_same(stored: Mapping[str, Any], config: RunConfig, run: Path) -> None:
    """Raises UsageError where a run would go on with another configuration than the one that it was begun with."""
    for path, old, new in differences(dict(stored), to_plain(config)):
        if path.split(".")[0] not in FREE:
            raise UsageError(
                f"{run} was begun with {path}={old!r:.60}, not {new!r:.60}: `plait train {run}` resumes it as it is;"
                " out=ANOTHER begins a new run"
            )


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Paths of files from the root on, so that the run goes on from any directory."""
    sources = tuple(
        replace(
            source,
            path=_absolute(source.path),
            target_path=_absolute(source.target_path),
            join=None if source.join is None else replace(source.join, path=_absolute(source.join.path)),
        )
        for source in config.data.sources
    )
    tokenizer = replace(config.data.tokenizer, path=_absolute(config.data.tokenizer.path))
    model = _absolute(config.model) if isinstance(config.model, str) else config.model
    return replace(config, model=model, data=replace(config.data, sources=sources, tokenizer=tokenizer))


def _absolute(path: str) -> str:
    """Of what names no file here (nothing, hf:...) itself."""
    return path if not path or path.startswith("hf:") else str(Path.cwd() / Path(path).expanduser())


def _at_least(least: int, section: str, part: Any, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{section}.{name}={value} must be at least {least}")
