"""From a checkpoint (or a live decoder) to an engine: sizes the pool, says what fits, wires the parts together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from plait.engine.adapters import AdapterInfo, adapter_line, check_adapters, describe, load_adapters
from plait.engine.loading import LoadedModel, check_device, choose_plan, is_decoder, load_model
from plait.errors import CapacityError, PlaitError, UsageError
from plait.kernels.native import available_memory_bytes, native_library, reason
from plait.memory.layout import CacheLayout, make_layout
from plait.model.rope import short_rope_tokens

if TYPE_CHECKING:
    from plait.engine.engine import Engine
    from plait.kernels.native import NativeLibrary
    from plait.model.config import ModelConfig
    from plait.model.decoder import Decoder
    from plait.plan.load import NativeModel
    from plait.text.tokenizer import Tokenizer

# Of the memory that is free once the weights are loaded, the pool may take this share. Untouched pages cost nothing.
KV_SHARE = 0.5
MAX_THREADS = 256  # of the native library
PLANS = ("auto", "native", "reference")
KV_DTYPES = {"auto": 0, "fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a number
_MAX_BYTES = 2**60
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "t": 10**12}


@dataclass
class EngineBundle:
    """An engine with what belongs to it. plan: "native" or "reference". lines: what a person is told at start-up.

    precision: what the weights are kept in. loaded: the model itself. adapters: by name, in the order of their numbers.
    """

    engine: Engine
    loaded: LoadedModel
    max_model_len: int
    plan: str
    precision: str
    report: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Built when it is first asked for; None for a live decoder that came without one."""
        return self.loaded.tokenizer

    @property
    def decoder(self) -> Decoder:
        """The model as a Decoder. One whose weights are packed has names, shapes and values, but computes nothing."""
        return self.loaded.decoder

    @property
    def config(self) -> ModelConfig:
        return self.loaded.config

    @property
    def default_params(self) -> dict[str, Any]:
        return self.loaded.defaults

    @property
    def name(self) -> str:
        return self.loaded.name


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
    plan: str = "auto",
    adapters: Any = None,
    **_: Any,
) -> None:
    """Raise UsageError for options of `build_engine` that no model can satisfy."""
    if plan not in PLANS:
        raise UsageError(f"plan {plan!r:.40}: choose {', '.join(PLANS)}")
    if kv_memory is not None:
        parse_bytes(kv_memory)
    check_device(device)
    choose_plan(plan, device)
    if threads is not None and threads > MAX_THREADS:
        raise UsageError(f"threads={threads} must be at most {MAX_THREADS}")
    _check_kv_dtype(kv_dtype)
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
    check_adapters(adapters)


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
    plan: str = "auto",
    adapters: Mapping[str, str | Path] | None = None,
    **options: Any,
) -> EngineBundle:
    """Load a model and put an engine around it.

    model: None (the default model), a path, `hf:OWNER/NAME`, a live Decoder, or what `load_model` gave. kv_memory:
    bytes of the key/value pool; default kv_share of the free memory, at most what max_num_seqs full contexts need.
    max_model_len: default the model's own, lowered to what fits. adapters: names and directories of LoRA adapters,
    which requests choose among by name. Further options go to `Engine`. Raises PlaitError for
    what cannot work.
    """
    from plait.engine.engine import Engine

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
        adapters=adapters,
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
            plan=plan,
        )
    lora = load_adapters(check_adapters(adapters), loaded)
    infos = describe(lora)
    config = loaded.config
    kv_dtype = settle_kv_dtype(kv_dtype, loaded)
    wanted = config.max_positions if max_model_len is None else max_model_len
    if wanted > config.max_positions:
        raise CapacityError(
            f"max_model_len={wanted} is beyond the model's {config.max_positions} positions", field="max_model_len"
        )
    layout = make_layout(config.caches(), KV_DTYPES[kv_dtype], wanted, max_batched_tokens)
    full = layout.blocks_per_sequence(wanted, max_batched_tokens) * max_num_seqs + 1
    if kv_memory is None:
        num_blocks = min(int(available_memory_bytes() * kv_share) // layout.block_bytes, full)
    else:
        num_blocks = parse_bytes(kv_memory) // layout.block_bytes
    length, notes = _fitting_length(layout, num_blocks, wanted, max_batched_tokens, explicit=max_model_len is not None)
    executor = make_executor(loaded, layout, num_blocks, max_batched_tokens, kv_dtype)
    if lora:
        executor.set_adapters(lora)
    engine = Engine(
        executor,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        eos_token_ids=frozenset(config.eos_token_ids) | loaded.eos_token_ids,
        short_rope_tokens=short_rope_tokens(config.rotary),
        adapters={name: info.content_hash for name, info in infos.items()},
        **options,
    )
    bundle = EngineBundle(engine, loaded, length, "reference" if loaded.native is None else "native", loaded.precision)
    bundle.report = memory_report(config, layout, num_blocks, length, max_batched_tokens, loaded.weight_bytes)
    if loaded.native is not None and loaded.native.store.second_bytes:
        bundle.report["second_layout_bytes"] = loaded.native.store.second_bytes  # of weight_bytes
    bundle.adapters = infos
    bundle.report["adapter_bytes"] = executor.adapter_bytes
    bundle.report["kv_pool_touched_bytes"] = executor.touched_bytes()
    bundle.report |= _plan_report(bundle.plan, executor, kv_dtype)
    loading = [] if loaded.report is None else loaded.report.lines()
    automatic = plan == "auto" and device.startswith("cpu")
    missed = reason() if automatic and native_library() is None and not is_decoder(model) else None
    lines = map(adapter_line, infos.values())
    bundle.lines = [*loading, *lines, *_plan_lines(bundle.report, loaded, missed), *notes, _fits_line(bundle.report)]
    if loaded.defaults:
        shown = ", ".join(f"{k}={v}" for k, v in loaded.defaults.items())
        bundle.lines.append(f"sampling defaults from the checkpoint: {shown}")
    return bundle


def _check_kv_dtype(name: str) -> None:
    if name not in KV_DTYPES:
        later = " (q8_0 is not supported yet)" if name == "q8_0" else ""
        raise UsageError(f"kv_dtype {name!r:.40}: choose {', '.join(KV_DTYPES)}{later}")


def settle_kv_dtype(name: str, loaded: LoadedModel) -> str:
    """What "auto" means for a model: the reference keeps keys and values in the dtype that it computes in; the native
    plan in bf16, beside fp32 weights in fp32."""
    if name != "auto":
        return name
    if loaded.native is not None:
        return "fp32" if set(loaded.native.store.layouts()) == {"F32"} else "bf16"
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(loaded.precision, "fp32")


def make_executor(
    loaded: LoadedModel, layout: CacheLayout, num_blocks: int, max_batched_tokens: int, kv_dtype: str
) -> Any:
    """The executor, with its pool. CapacityError or UsageError where the machine does not give the memory."""
    sizes = (layout, num_blocks, max_batched_tokens)
    try:
        if loaded.native is not None:
            from plait.plan.executor import NativeExecutor

            native = loaded.native
            options: dict[str, Any] = {"kv_dtype": kv_dtype, "sampled_ids": loaded.vocab_size}
            if loaded.is_live:
                return live_executor(loaded.decoder, native, *sizes, **options)
            return NativeExecutor(native.recording, native.store, *sizes, **options)
        import torch

        from plait.engine.reference_executor import ReferenceExecutor

        numbers = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kv_dtype]
        return ReferenceExecutor(loaded.decoder, *sizes, numbers, sampled_ids=loaded.vocab_size)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _is_allocation(error):
            raise
        size = f"{num_blocks * layout.block_bytes / 2**30:,.1f} GiB"
        raise UsageError(
            f"this machine does not give the memory for steps of {max_batched_tokens} tokens beside {size} for keys and"
            " values: lower max_batched_tokens or --kv-memory"
        ) from error


def _is_allocation(error: RuntimeError) -> bool:
    """Whether torch could not allocate: it has no class of its own for that on the CPU."""
    return not isinstance(error, PlaitError) and bool(re.search(r"out of memory|alloc", str(error), re.IGNORECASE))


def live_executor(decoder: Decoder, native: NativeModel, *sizes: Any, **options: Any) -> Any:
    """A native executor whose `refresh` packs the decoder's present parameters into its standing buffers."""
    from plait.plan.executor import NativeExecutor
    from plait.weights.pack import pack_decoder

    class LiveExecutor(NativeExecutor):
        def refresh(self, store: Any = None) -> None:
            super().refresh(pack_decoder(decoder, store=native.store) if store is None else store)

    return LiveExecutor(native.recording, native.store, *sizes, **options)


def _plan_report(plan: str, executor: Any, kv_dtype: str) -> dict[str, Any]:
    """How steps are computed; threads: of the process that computes them."""
    if plan == "reference":
        return {"plan": plan, "kv_dtype": kv_dtype}
    native = cast("NativeLibrary", native_library())
    return {
        "plan": plan,
        "kv_dtype": kv_dtype,
        "isa": native.isa(),
        "threads": native.threads(),
        "plan_bytes": executor.plan_bytes,
        "host_ops": list(executor.host_ops),
    }


def _plan_lines(report: dict[str, Any], loaded: LoadedModel, missed: str | None) -> list[str]:
    """missed: why there is no native library, where that decided."""
    if loaded.native is None:
        lines = [f"plan: reference, keys and values in {report['kv_dtype']}"]
        return lines if missed is None else [*lines, f"the native plan cannot be used: no native library, {missed}"]
    counts = loaded.native.store.layouts()
    formats = ", ".join(f"{count} {layout}" for layout, count in sorted(counts.items()))
    threads = f"{report['threads']} thread{'' if report['threads'] == 1 else 's'}"
    lines = [
        f"plan: native ({report['isa']}, {threads}), matrices {formats}, keys and values in {report['kv_dtype']},"
        f" {report['plan_bytes'] / 2**20:,.0f} MiB of buffers"
    ]
    foreign = [name for name in report["host_ops"] if name != "store_logits"]  # that one only copies
    if foreign:
        lines.append(f"without a native kernel, computed by the reference: {', '.join(foreign)}")
    return lines


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
    config: ModelConfig, layout: CacheLayout, num_blocks: int, max_model_len: int, chunk: int, weight_bytes: int
) -> dict[str, Any]:
    """Bytes by part, and how many tokens and full-length requests fit in the pool."""
    per_request = layout.blocks_per_sequence(max_model_len, chunk)
    return {
        "weight_bytes": weight_bytes,
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
