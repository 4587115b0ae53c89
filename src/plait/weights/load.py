"""Loads a checkpoint into a `Decoder`: every tensor used once, every parameter filled once, peak memory one tensor
more."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from plait.errors import UsageError, WeightError
from plait.kernels.native import cpu_features
from plait.model.config import ModelConfig
from plait.model.decoder import Decoder, build
from plait.weights.checkpoint import Checkpoint, open_checkpoint
from plait.weights.mapping import Assignment, BoundMap
from plait.weights.sources import TensorSource

log = logging.getLogger("plait.load")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass
class LoadReport:
    """What loading did. formats: tensors by storage format of the file; expanded: those that were not floats there."""

    path: str
    format: str
    dtype: str
    parameters: int = 0
    weight_bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    expanded: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """For people: what was loaded, what was expanded, what was left out."""
        size = self.weight_bytes / 2**20
        out = [
            f"{self.path}: {self.parameters / 1e6:.1f}M parameters, {self.dtype}, {size:,.0f} MiB, {self.seconds:.1f} s"
        ]
        if self.expanded:
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.expanded.items()))
            out.append(f"expanded to {self.dtype} at load: {kinds}")
        if self.skipped:
            shown = ", ".join(self.skipped[:3]) + (", ..." if len(self.skipped) > 3 else "")
            out.append(f"skipped: {len(self.skipped)} tensors ({shown})")
        return out + self.notes


def choose_dtype(name: str | torch.dtype | None, config: ModelConfig, device: str) -> tuple[torch.dtype, list[str]]:
    """The compute dtype for a name (auto, bf16, fp16, fp32), and what to tell the user.

    auto on a CPU: bf16 where it multiplies bf16 faster than fp32 (its features), else fp32; on a GPU bf16.
    """
    if isinstance(name, torch.dtype):
        dtype = name
    elif name in (None, "auto"):
        if torch.device(device).type == "cpu":
            fast = cpu_features().has("avx512_bf16") or cpu_features().has("amx_bf16")
            dtype = torch.bfloat16 if fast else torch.float32
        else:
            dtype = torch.bfloat16
    elif name in DTYPES:
        dtype = DTYPES[name]
    else:
        raise UsageError(f"dtype {name!r} is unknown; choose auto, {', '.join(DTYPES)}")
    if dtype == torch.float16 and config.fp16_overflows:
        return torch.bfloat16, [f"{config.model_type} overflows in fp16: bf16 is used instead"]
    return dtype, []


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
    dropped = _settle_head(checkpoint)
    config = checkpoint.config
    chosen, notes = choose_dtype(dtype, config, device)
    decoder = build(config, chosen, device)
    report = LoadReport(str(checkpoint.path), checkpoint.format, str(chosen).removeprefix("torch."), notes=notes)
    with torch.no_grad():
        _fill(decoder, checkpoint, report, dropped)
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


def _fill(decoder: Decoder, checkpoint: Checkpoint, report: LoadReport, dropped: list[str]) -> None:
    parameters = dict(decoder.named_parameters())
    source, config = checkpoint.source, checkpoint.config
    names = [name for name in source.names() if name not in dropped]
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    plan = BoundMap(config, checkpoint.names).incoming(names, shapes)
    report.skipped = [*dropped, *plan.skipped]
    formats: Counter[str] = Counter()
    for assignment in plan.assignments:
        kind = source.info(assignment.file).format
        formats[kind] += 1
        _check_shape(assignment, source.info(assignment.file).shape, shapes)
        tensor = source.read(assignment.file)
        if assignment.offset:
            tensor = tensor.float() + assignment.offset
        for part in assignment.parts:
            rows = tensor if part.rows is None else tensor[torch.from_numpy(part.rows)]
            parameters[part.name].copy_(rows)
    report.formats = dict(formats)
    report.expanded = {k: n for k, n in formats.items() if k not in ("F64", "F32", "F16", "BF16")}


def _check_shape(assignment: Assignment, found: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> None:
    parts = [shapes[p.name] for p in assignment.parts]
    expected = (sum(s[0] for s in parts), *parts[0][1:])
    if tuple(found) != expected:
        raise WeightError(f"{assignment.file} has shape {tuple(found)}; the configuration makes it {expected}")


def _head_names(checkpoint: Checkpoint) -> set[str]:
    """The file names under which an output head may stand."""
    ours = {_HEAD}
    files = {r.file for r in checkpoint.names.rules if r.ours == (_HEAD,)}
    prefixed = {
        theirs + _HEAD.removeprefix(mine) for theirs, mine in checkpoint.names.prefixes if _HEAD.startswith(mine)
    }
    return (files or ours) | prefixed | ours


def _settle_head(checkpoint: Checkpoint) -> list[str]:
    """A tied model whose file also holds a head: the flag wins where it is given, a differing head where it is not.

    Returns the heads that are left out. Raises WeightError for a head of another shape than the configuration's.
    """
    config, source = checkpoint.config, checkpoint.source
    known = _head_names(checkpoint)
    heads = [name for name in source.names() if name in known]
    if not config.tie_embeddings or not heads:
        return []
    expected = (config.vocab_size, config.hidden_size)
    for head in heads:
        if source.info(head).shape != expected:
            raise WeightError(f"{head} has shape {source.info(head).shape}; the configuration makes it {expected}")
    table = BoundMap(config, checkpoint.names).file_of(_EMBEDDING, source.names())
    if table is None or _equal(source, table, heads[0]):
        return heads
    if checkpoint.raw.get("tie_word_embeddings") is None:
        log.warning("%s differs from the embedding and tie_word_embeddings is not given: the head is used", heads[0])
        checkpoint.with_config(tie_embeddings=False)
        return []
    log.warning("%s differs from the embedding, but tie_word_embeddings is true: the head is ignored", heads[0])
    return heads


def _equal(source: TensorSource, first: str, second: str) -> bool:
    if source.info(first).shape != source.info(second).shape:
        return False
    a, b = source.read(first), source.read(second)
    return bool(torch.equal(a, b.to(a.dtype)))
