"""Loads a checkpoint into a `Decoder`: every tensor used once, every parameter filled once, peak memory one tensor
more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from plait.errors import UsageError
from plait.model.config import ModelConfig
from plait.model.decoder import Decoder, build
from plait.weights.arrange import DTYPES, PLAIN_FORMATS, LoadReport, arrange, cpu_dtype, settle_dtype, settle_head
from plait.weights.checkpoint import Checkpoint, open_checkpoint

__all__ = ["LoadReport", "choose_dtype", "load"]


def choose_dtype(name: str | torch.dtype | None, config: ModelConfig, device: str) -> tuple[torch.dtype, list[str]]:
    """The compute dtype for a name (auto, bf16, fp16, fp32), and what to tell the user.

    auto on a CPU: bf16 where it multiplies bf16 faster than fp32 (its features), else fp32; on a GPU bf16.
    """
    if isinstance(name, torch.dtype) and str(name).removeprefix("torch.") not in DTYPES.values():
        return name, []  # float64, for tests of arithmetic
    chosen, notes = settle_dtype(name, config)
    if chosen == "auto":
        chosen = cpu_dtype() if torch.device(device).type == "cpu" else "bf16"
    return getattr(torch, DTYPES[chosen]), notes


def load(
    model: str | Path | Checkpoint | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    strict: bool = False,
) -> Decoder:
    """A `Decoder` from a GGUF file, a Hugging Face directory, `hf:OWNER/NAME`, or (None) the default model.

    dtype: a torch dtype or "auto", "bf16", "fp16", "fp32"; None is "auto". Quantised tensors are expanded. The result's
    `load_report` says what was done. Raises ConfigError, WeightError or UsageError with the name of what is wrong.
    """
    start = time.perf_counter()
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model, strict)
    _check_device(device)
    dropped = settle_head(checkpoint)
    config = checkpoint.config
    chosen, notes = choose_dtype(dtype, config, device)
    decoder = build(config, chosen, device)
    report = LoadReport(str(checkpoint.path), checkpoint.format, str(chosen).removeprefix("torch."), notes=notes)
    with torch.no_grad():
        fill_parameters(dict(decoder.named_parameters()), checkpoint, report, dropped)
    decoder.source = checkpoint.path
    report.parameters = decoder.param_counts()["total"]
    report.weight_bytes = sum(p.numel() * p.element_size() for p in decoder.parameters())
    report.seconds = time.perf_counter() - start
    decoder.load_report = report
    return decoder


def _check_device(device: str) -> None:
    kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")


def fill_parameters(
    parameters: Mapping[str, torch.Tensor], checkpoint: Checkpoint, report: LoadReport, dropped: list[str]
) -> None:
    """Fill parameters, by name, from a checkpoint; see `arrange`. report: gets formats and what was expanded."""
    source = checkpoint.source
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    for assignment in arrange(checkpoint, shapes, dropped, report).assignments:
        tensor = source.read(assignment.file)
        if assignment.offset:
            tensor = tensor.float() + assignment.offset
        for part in assignment.parts:
            rows = tensor if part.rows is None else tensor[torch.from_numpy(part.rows)]
            target: torch.Tensor = parameters[part.name]
            if part.place is not None:
                target = part.place.of(target)
                rows = part.place.from_file(rows.reshape(target.shape))
            target.copy_(rows.reshape(target.shape) if assignment.one_row else rows)
    report.expanded = {k: n for k, n in report.formats.items() if k not in PLAIN_FORMATS}
