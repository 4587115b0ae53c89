"""From a configuration to what a run is made of: data, decoder, optimiser, precision."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plait.engine.loading import check_device, set_threads
from plait.errors import TrainingError, UsageError
from plait.jsonfile import read_json_if_there
from plait.kernels.native import usable_cpus
from plait.model.config import MixtureSpec
from plait.model.decoder import Decoder, from_config
from plait.model.families import parse_config
from plait.text.tokenizer import Tokenizer, load_tokenizer
from plait.training.checkpoints import Found
from plait.training.config import ExpertsConfig, RunConfig
from plait.training.data.batches import Batches
from plait.training.data.build import Data, Progress, build_data
from plait.training.loop import Parts
from plait.training.optimizers import RoleOptimizer, build_optimizer, table
from plait.training.precision import choose_precision
from plait.training.routing import StepRouting
from plait.weights.hf_files import sync, write_json, write_tokenizer
from plait.weights.load import load
from plait.weights.locate import locate

TOKENIZER = "tokenizer"  # folder of a run


@dataclass(frozen=True)
class Assembled:
    """parts: for the loop. data: what they were made of. lines: what a person is told."""

    parts: Parts
    data: Data
    lines: list[str]


def assemble(config: RunConfig, run: Path, found: Found | None, progress: Progress | None = None) -> Assembled:
    """Everything that `Loop` needs. found: the checkpoint to go on from; its weights are loaded.

    Raises PlaitError for what cannot be, before a step is made.
    """
    _prepare_device(config)
    start = locate(config.model) if isinstance(config.model, str) else None
    folder = run / TOKENIZER
    data = build_data(config.data, _tokenizer(config, folder, start), progress)
    _keep_tokenizer(folder, data.tokenizer, start if not config.data.tokenizer.path else None)
    decoder = _decoder(config, data.tokenizer, start, found)
    decoder.source = folder  # checkpoints bring it along, so that each is a model of its own
    _check_fit(config, decoder, data)
    settings = dict(config.optimizer.options) | ({} if config.optimizer.lr is None else {"lr": config.optimizer.lr})
    optimizer = build_optimizer(config.optimizer.name, decoder, **settings)
    precision = choose_precision(config.train.precision, config.device)
    train = Batches(data.train, config.train.batch_tokens, config.seed, pad_id=data.pad_id)
    parts = Parts(
        decoder,
        optimizer,
        precision,
        train,
        _validation(config, data),
        data.languages,
        data.tokenizer,
        _routing(config, decoder),
        data.fingerprint,
    )
    counts = decoder.param_counts()
    lines = [
        *data.report.lines(),
        f"batches of at most {config.train.batch_tokens:,} tokens: {train.per_epoch:,} in an epoch of"
        f" {train.tokens():,} tokens, {train.padding_share():.1%} of the positions padding;"
        f" {config.train.tokens / max(1, train.tokens()):.2f} epochs in all",
        f"{decoder.config.model_type}: {counts['total']:,} parameters, {counts['active']:,} active",
        *_optimizer_lines(optimizer),
        f"precision {precision.name}: {precision.why}",
    ]
    if parts.routing is None and config.experts != ExpertsConfig():
        lines.append("experts: this model has no mixture, so that this section of the recipe does nothing")
    return Assembled(parts, data, lines)


def _prepare_device(config: RunConfig) -> None:
    check_device(config.device)
    if config.device.startswith("cpu"):
        set_threads(config.threads or usable_cpus(), "cpu", "reference")  # torch's, and the optimiser's kernels
    else:
        index = torch.device(config.device).index  # torch wants a number
        number = torch.cuda.current_device() if index is None else index
        torch.cuda.set_per_process_memory_fraction(config.train.memory_fraction, number)


def _tokenizer(config: RunConfig, folder: Path, start: Path | None) -> Tokenizer | None:
    """The run's own where it has one, else the starting checkpoint's; None: the data's section decides."""
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder)
    return load_tokenizer(start) if start is not None and not config.data.tokenizer.path else None


def _keep_tokenizer(folder: Path, tokenizer: Tokenizer, start: Path | None) -> None:
    """The tokenizer's files in the run. Of a starting checkpoint all of them, with its chat template.

    All end tokens go along: those that only a config.json or a GGUF file names would be missing when the run goes on,
    and its data would seem to be others. Written beside and renamed, so that a kill leaves no half of it.
    """
    if (folder / "tokenizer.json").exists():
        return
    temporary = folder.with_name(f".{folder.name}.writing")
    for left in (temporary, folder):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    if start is not None:
        write_tokenizer(start, temporary)
    else:
        tokenizer.save(temporary)
    generation = temporary / "generation_config.json"
    settings = read_json_if_there(generation, TrainingError)
    known = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    settings = {**{key: value for key, value in known.items() if value is not None}, **settings}
    if tokenizer.eos_token_ids:
        settings["eos_token_id"] = sorted(tokenizer.eos_token_ids)
    write_json(generation, settings)
    for file in (*temporary.iterdir(), temporary):
        sync(file)
    os.rename(temporary, folder)


def _decoder(config: RunConfig, tokenizer: Tokenizer, start: Path | None, found: Found | None) -> Decoder:
    """In fp32 on the run's device."""
    if found is not None:
        return load(found.path, torch.float32, config.device)
    if start is not None:
        return load(start, torch.float32, config.device)
    assert isinstance(config.model, dict)
    raw = dict(config.model)
    if raw.get("vocab_size", "auto") == "auto":
        raw["vocab_size"] = tokenizer.vocab_size
    known: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": min(tokenizer.eos_token_ids, default=None),
        "pad_token_id": tokenizer.pad_token_id,
    }
    for key, value in known.items():
        if value is not None:
            raw.setdefault(key, value)
    parse_config(raw, strict=True)  # a key that no model knows is an error here: the recipe's writer can mend it
    return from_config(raw, seed=config.seed).to(config.device)


def _check_fit(config: RunConfig, decoder: Decoder, data: Data) -> None:
    size, needed = decoder.config.vocab_size, data.tokenizer.vocab_size
    if needed > size:
        raise UsageError(f"the tokenizer has {needed} entries, more than the model's vocab_size={size}")
    if config.data.context > decoder.config.max_positions:
        raise UsageError(
            f"data.context={config.data.context} is longer than the model's {decoder.config.max_positions} positions"
        )


def _validation(config: RunConfig, data: Data) -> list[Any]:
    """Batches of the validation split, evenly spaced over its lengths where not all are wanted."""
    if not len(data.valid) or not config.every(config.evaluate):
        return []
    batches = Batches(data.valid, config.train.batch_tokens, pad_id=data.pad_id, shuffle=False)
    count, wanted = batches.per_epoch, config.evaluate.batches or batches.per_epoch
    chosen = range(count) if wanted >= count else [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]
    return [batches.batch(0, i) for i in chosen]


def _routing(config: RunConfig, decoder: Decoder) -> StepRouting | None:
    if not any(isinstance(layer.feed_forward, MixtureSpec) for layer in decoder.config.layers):
        return None
    e, c = config.experts, decoder.config
    return StepRouting(
        decoder,
        balance=c.balance_loss_coef if e.balance is None else e.balance,
        z=c.z_loss_coef if e.z is None else e.z,
        scope=e.balance_scope,
        bias_update=e.bias_update,
    )


def _optimizer_lines(optimizer: RoleOptimizer) -> Iterator[str]:
    for row in table(optimizer):
        rate = f"; lr {row['lr']:g}, decay {row['weight_decay']:g}, rule {row['rule']}" if row["rule"] else ""
        yield f"  {row['group']}: {row['role']}, {row['tensors']} tensors, {row['parameters']:,} numbers{rate}"
