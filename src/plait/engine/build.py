"""From a checkpoint (or a live decoder) to an engine: sizes the pool, says what fits, wires the parts together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import CapacityError, ConfigError, RequestError, UsageError
from plait.kernels.native import available_memory_bytes, usable_cpus
from plait.memory.layout import CacheLayout, make_layout

if TYPE_CHECKING:
    from plait.engine.engine import Engine
    from plait.model.config import ModelConfig
    from plait.model.decoder import Decoder
    from plait.text.tokenizer import Tokenizer

# Of the memory that is free once the weights are loaded, the pool may take this share. Untouched pages cost nothing.
KV_SHARE = 0.5
MAX_THREADS = 1024
_MAX_BYTES = 2**60
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "t": 10**12}


@dataclass
class EngineBundle:
    """An engine with what belongs to it. lines: what a person is told at start-up."""

    engine: Engine
    tokenizer: Tokenizer | None
    config: ModelConfig
    default_params: dict[str, Any]
    max_model_len: int
    name: str
    report: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def parse_bytes(text: int | str) -> int:
    """Bytes from a number or from text such as "2GiB", "512M". Raises UsageError."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if not isinstance(text, str):
        raise UsageError(f"{text!r:.40} is no amount of memory; give bytes, or text such as 2GiB")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    unit = match and _UNITS.get(match[2].lower())
    if not match or unit is None:
        raise UsageError(f"{text!r:.40} is no amount of memory; write for example 2GiB or 512MiB")
    size = float(match[1]) * unit
    if size > _MAX_BYTES:
        raise UsageError(f"{text!r:.40} is more memory than any machine has")
    return int(size)


def check_device(device: str) -> None:
    """UsageError for a device that is not supported, or that this machine lacks."""
    match = re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,3}))?", device) if isinstance(device, str) else None
    if match is None:
        raise UsageError(f"device {device!r:.40} is not supported: choose cpu or cuda (cuda:1, ...)")
    if match[1] == "cuda":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(match[2] or 0) >= count:
            raise UsageError(f"there is no device {device} here ({count} CUDA devices): use cpu")


@dataclass
class LoadedModel:
    """Weights in memory and what came with them. defaults: the checkpoint's own sampling parameters."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    defaults: dict[str, Any]
    name: str


def check_options(
    *,
    device: str = "cpu",
    kv_memory: int | str | None = None,
    kv_dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 32,
    max_batched_tokens: int = 512,
    generation_config: str = "auto",
    threads: int | None = None,
    plan: str = "reference",
    **_: Any,
) -> None:
    """Raise UsageError for options of `build_engine` that no model can satisfy."""
    if plan != "reference":
        raise UsageError(f"plan {plan!r} is not available yet: use 'reference'")
    if kv_memory is not None:
        parse_bytes(kv_memory)
    check_device(device)
    if threads is not None and threads > MAX_THREADS:
        raise UsageError(f"threads={threads} must be at most {MAX_THREADS}")
    _kv_dtype(kv_dtype, None)
    for name, value in (
        ("max_model_len", max_model_len),
        ("threads", threads),
        ("max_num_seqs", max_num_seqs),
        ("max_batched_tokens", max_batched_tokens),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1")
    if max_num_seqs > max_batched_tokens:
        raise UsageError(f"max_num_seqs={max_num_seqs} sequences do not fit in a step of {max_batched_tokens} tokens")
    if generation_config not in ("auto", "none"):
        raise UsageError(f"generation_config={generation_config!r} must be 'auto' or 'none'")


def load_model(
    model: str | Path | Decoder | None = None,
    *,
    dtype: Any = "auto",
    device: str = "cpu",
    strict: bool = False,
    generation_config: str = "auto",
    threads: int | None = None,
    tokenizer: Tokenizer | None = None,
    **_: Any,
) -> LoadedModel:
    """Load what `build_engine` needs of a model; takes the same options and ignores those of the engine.

    threads: of this process from now on, for loading too; default all usable processors.
    """
    import torch

    from plait.model.decoder import Decoder
    from plait.text.tokenizer import load_tokenizer
    from plait.weights.checkpoint import open_checkpoint
    from plait.weights.load import load

    if device.startswith("cpu"):
        torch.set_num_threads(usable_cpus() if threads is None else threads)
    if isinstance(model, Decoder):
        return LoadedModel(model, tokenizer, {}, model.config.model_type)
    checkpoint = open_checkpoint(model, strict)
    defaults: dict[str, Any] = {}
    if generation_config == "auto":
        defaults = checkpoint.generation_defaults
        _check_defaults(checkpoint.path, defaults)
    decoder = load(checkpoint, dtype, device, strict)
    tokenizer = tokenizer or load_tokenizer(checkpoint.path)
    checkpoint.source.close()
    name = checkpoint.path.stem if checkpoint.path.is_file() else checkpoint.path.name
    return LoadedModel(decoder, tokenizer, defaults, name)


def _check_defaults(path: Path, defaults: dict[str, Any]) -> None:
    from plait.engine.params import SamplingParams
    from plait.weights.checkpoint import GGUF_SAMPLING_KEYS, config_file

    try:
        SamplingParams(**defaults)
    except RequestError as error:
        beside = config_file(path)
        if beside is not None:
            where = str(beside.with_name("generation_config.json"))
        else:
            where = f"{path}, {next(key for key, name in GGUF_SAMPLING_KEYS.items() if name == error.field)}"
        raise ConfigError(f"{where}: {error}; correct it, or set --generation-config none") from None


def build_engine(
    model: str | Path | Decoder | LoadedModel | None = None,
    *,
    dtype: Any = "auto",
    device: str = "cpu",
    kv_memory: int | str | None = None,
    kv_share: float = KV_SHARE,
    kv_dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 32,
    max_batched_tokens: int = 512,
    generation_config: str = "auto",
    threads: int | None = None,
    strict: bool = False,
    tokenizer: Tokenizer | None = None,
    plan: str = "reference",
    **options: Any,
) -> EngineBundle:
    """Load a model and put an engine around it.

    model: None (the default model), a path, `hf:OWNER/NAME`, a live Decoder, or what `load_model` gave. kv_memory:
    bytes of the key/value pool; default kv_share of the free memory, at most what max_num_seqs full contexts need.
    max_model_len: default the model's own, lowered to what fits. Further options go to `Engine`. Raises PlaitError for
    what cannot work.
    """
    from plait.engine.engine import Engine
    from plait.engine.reference_executor import ReferenceExecutor

    # What can be refused without the weights is refused before they are loaded.
    check_options(
        device=device,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        generation_config=generation_config,
        threads=threads,
        plan=plan,
    )
    if isinstance(model, LoadedModel):
        loaded = model
    else:
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            strict=strict,
            generation_config=generation_config,
            threads=threads,
            tokenizer=tokenizer,
        )
    decoder, tokenizer, defaults = loaded.decoder, loaded.tokenizer, loaded.defaults
    config = decoder.config
    numbers = _kv_dtype(kv_dtype, decoder.dtype)
    wanted = config.max_positions if max_model_len is None else max_model_len
    if wanted > config.max_positions:
        raise CapacityError(
            f"max_model_len={wanted} is beyond the model's {config.max_positions} positions", field="max_model_len"
        )
    layout = make_layout(config.caches(), numbers.itemsize, wanted, max_batched_tokens)
    full = layout.blocks_per_sequence(wanted, max_batched_tokens) * max_num_seqs + 1
    if kv_memory is None:
        num_blocks = min(int(available_memory_bytes() * kv_share) // layout.block_bytes, full)
    else:
        num_blocks = parse_bytes(kv_memory) // layout.block_bytes
    length, notes = _fitting_length(layout, num_blocks, wanted, max_batched_tokens, explicit=max_model_len is not None)
    try:
        executor = ReferenceExecutor(decoder, layout, num_blocks, max_batched_tokens, numbers)
    except (RuntimeError, MemoryError, OverflowError, ValueError):
        size = f"{num_blocks * layout.block_bytes / 2**30:,.1f} GiB"
        raise UsageError(f"this machine does not give {size} for keys and values: lower --kv-memory") from None
    engine = Engine(
        executor,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        vocab_limit=tokenizer.vocab_size if tokenizer else None,
        eos_token_ids=frozenset(config.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset()),
        **options,
    )
    bundle = EngineBundle(engine, tokenizer, config, defaults, length, loaded.name)
    bundle.report = memory_report(config, layout, num_blocks, length, max_batched_tokens, decoder)
    bundle.report["kv_pool_touched_bytes"] = executor.touched_bytes()
    bundle.lines = [*(decoder.load_report.lines() if decoder.load_report else []), *notes, _fits_line(bundle.report)]
    if defaults:
        shown = ", ".join(f"{k}={v}" for k, v in defaults.items())
        bundle.lines.append(f"sampling defaults from the checkpoint: {shown}")
    return bundle


def _kv_dtype(name: str, compute: Any) -> Any:
    import torch

    known = {"auto": compute, "fp32": torch.float32, "bf16": torch.bfloat16}
    if name not in known:
        later = " (q8_0 is not supported yet)" if name == "q8_0" else ""
        raise UsageError(f"kv_dtype {name!r}: choose auto, fp32 or bf16{later}")
    return known[name]


def _fitting_length(
    layout: CacheLayout, num_blocks: int, wanted: int, chunk: int, explicit: bool
) -> tuple[int, list[str]]:
    """The longest context up to `wanted` that one request can have in the pool; lowered only where nobody asked for
    it."""
    usable = num_blocks - 1
    if layout.blocks_per_sequence(wanted, chunk) <= usable:
        return wanted, []
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.blocks_per_sequence(middle, chunk) <= usable else (low, middle - 1)
    need = layout.blocks_per_sequence(wanted, chunk) * layout.block_bytes
    have = max(usable, 0) * layout.block_bytes
    if low < 1 or explicit:
        raise CapacityError(
            f"a context of {wanted} tokens needs {need / 2**20:,.0f} MiB of keys and values, the pool has"
            f" {have / 2**20:,.0f} MiB: raise --kv-memory or lower --max-model-len",
            field="max_model_len",
        )
    return low, [f"max_model_len lowered from {wanted:,} to {low:,} tokens: that is what the key/value pool holds"]


def memory_report(
    config: ModelConfig, layout: CacheLayout, num_blocks: int, max_model_len: int, chunk: int, decoder: Any = None
) -> dict[str, Any]:
    """Bytes by part, and how many tokens and full-length requests fit in the pool."""
    per_request = layout.blocks_per_sequence(max_model_len, chunk)
    weights = sum(p.numel() * p.element_size() for p in decoder.parameters()) if decoder is not None else None
    return {
        "weight_bytes": weights,
        "kv_pool_bytes": num_blocks * layout.block_bytes,
        "kv_bytes_per_token": config.kv_bytes_per_token(layout.bytes_per_number),
        "kv_block_bytes": layout.block_bytes,
        "kv_groups": len(layout.groups),
        "kv_waste_bytes_per_block": layout.waste_bytes_per_block,
        "num_blocks": num_blocks,
        "max_model_len": max_model_len,
        "full_length_requests": (num_blocks - 1) // per_request,
    }


def _fits_line(report: dict[str, Any]) -> str:
    touched = report["kv_pool_touched_bytes"]
    now = "" if touched is None else f" ({touched / 2**20:,.0f} MiB in use)"
    return (
        f"key/value pool: up to {report['kv_pool_bytes'] / 2**20:,.0f} MiB{now},"
        f" {report['kv_bytes_per_token'] / 1024:.1f} KiB per token,"
        f" room for {report['full_length_requests']} requests of {report['max_model_len']:,} tokens"
    )
