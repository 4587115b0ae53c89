"""Loads the model of an engine: packed for the native plan, or as a decoder for the reference."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from plait.errors import ConfigError, RequestError, UsageError
from plait.kernels.native import native_library, reason, usable_cpus

if TYPE_CHECKING:
    from plait.model.config import ModelConfig
    from plait.model.decoder import Decoder
    from plait.plan.load import NativeModel
    from plait.text.tokenizer import Tokenizer
    from plait.weights.arrange import LoadReport


@dataclass
class LoadedModel:
    """Weights in memory and what came with them: a Decoder, or packed weights for the native plan.

    defaults: the checkpoint's own sampling parameters. vocab_size: of the tokenizer, None without one.
    """

    config: ModelConfig
    name: str
    defaults: dict[str, Any] = field(default_factory=dict)
    native: NativeModel | None = None
    vocab_size: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    _decoder: Decoder | None = None
    _tokenizer: Tokenizer | None = None

    @property
    def decoder(self) -> Decoder:
        if self._decoder is None:
            assert self.native is not None
            return self.native.decoder
        return self._decoder

    @property
    def tokenizer(self) -> Tokenizer | None:
        if self._tokenizer is None and self.native is not None and not self.is_live:
            self._tokenizer = self.native.tokenizer
        return self._tokenizer

    @property
    def is_live(self) -> bool:
        """Whether the packed weights are those of a decoder that may change."""
        return self.native is not None and self._decoder is not None

    @property
    def precision(self) -> str:
        """What the weights are kept in: a dtype, or the packed layouts."""
        if self.native is not None:
            return self.native.report.dtype
        return str(self.decoder.dtype).removeprefix("torch.")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are computed with."""
        if self.native is not None:
            return self.native.store.nbytes
        return sum(p.numel() * p.element_size() for p in self.decoder.parameters())

    @property
    def report(self) -> LoadReport | None:
        return self.native.report if self.native is not None else self.decoder.load_report


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


def choose_plan(plan: str, device: str, live: bool = False) -> str:
    """ "native" or "reference". auto: native on a CPU with the native library, unless the model is a live Decoder.

    Raises UsageError where the native plan was asked for and cannot be had.
    """
    on_cpu = device.startswith("cpu")
    if plan == "auto":
        return "native" if on_cpu and not live and native_library() is not None else "reference"
    if plan == "native":
        if not on_cpu:
            raise UsageError(f"the native plan runs on the CPU, not on {device}: leave out --plan or --device")
        if native_library() is None:
            raise UsageError(f"there is no native plan, because there is no native library ({reason()})")
    return plan


def load_model(
    model: str | Path | Decoder | None = None,
    *,
    dtype: Any = "auto",
    device: str = "cpu",
    strict: bool = False,
    generation_config: str = "auto",
    threads: int | None = None,
    tokenizer: Tokenizer | None = None,
    plan: str = "auto",
    **_: Any,
) -> LoadedModel:
    """Load what `build_engine` needs of a model; takes the same options and ignores those of the engine.

    threads: of this process from now on, for loading too; default all usable processors.
    """
    live = is_decoder(model)
    chosen = choose_plan(plan, device, live)
    set_threads(threads, device, chosen)
    if live:
        return _live_model(cast("Decoder", model), tokenizer, dtype, chosen)
    where = cast("str | Path | None", model)
    wanted = generation_config == "auto"
    if chosen == "native":
        return _native_model(where, dtype, threads, strict, tokenizer, wanted)
    return _reference_model(where, dtype, device, strict, tokenizer, wanted)


def is_decoder(model: object) -> bool:
    """Whether this is a live decoder rather than the name of a model."""
    if model is None or isinstance(model, (str, Path)):
        return False
    from plait.model.decoder import Decoder

    return isinstance(model, Decoder)


def set_threads(threads: int | None, device: str, plan: str) -> None:
    """Give this process's kernels so many threads (None: as many as the library, or torch, finds worth having).

    The library's also where the reference computes, because tokens are sampled there; torch's only where torch
    computes (on the native plan that is plait.plan.host's affair).
    """
    native = native_library()
    if native is not None:
        native.set_threads(0 if threads is None else threads)
    if plan == "native":
        assert native is not None
        native.isa()  # a wrong PLAIT_ISA is told before anything is loaded
    elif device.startswith("cpu"):
        import torch

        torch.set_num_threads(usable_cpus() if threads is None else threads)


def _live_model(decoder: Decoder, tokenizer: Tokenizer | None, dtype: Any, plan: str) -> LoadedModel:
    native = None
    if plan == "native":
        from plait.model.record import record
        from plait.plan.load import NativeModel
        from plait.weights.pack import pack_decoder

        store = pack_decoder(decoder, dtype)
        native = NativeModel(Path(), decoder.config, record(decoder), store, store.report)
    loaded = LoadedModel(decoder.config, decoder.config.model_type, {}, native, _decoder=decoder, _tokenizer=tokenizer)
    return _with_tokenizer(loaded, tokenizer)


def _native_model(
    model: str | Path | None,
    dtype: Any,
    threads: int | None,
    strict: bool,
    tokenizer: Tokenizer | None,
    with_defaults: bool,
) -> LoadedModel:
    from plait.plan.load import load_native

    native = load_native(model, dtype=dtype, threads=threads, strict=strict)
    defaults = native.read_defaults() if with_defaults else {}
    check_defaults(native.path, defaults)
    loaded = LoadedModel(native.config, _model_name(native.path), defaults, native, _tokenizer=tokenizer)
    if tokenizer is None and native.vocab_size is None:
        _ = native.tokenizer  # raises: nothing that is known of the model says how large its vocabulary is
    loaded.vocab_size, loaded.eos_token_ids = native.vocab_size, native.eos_token_ids
    return _with_tokenizer(loaded, tokenizer)


def _reference_model(
    model: str | Path | None,
    dtype: Any,
    device: str,
    strict: bool,
    tokenizer: Tokenizer | None,
    with_defaults: bool,
) -> LoadedModel:
    from plait.text.tokenizer import load_tokenizer
    from plait.weights.checkpoint import open_checkpoint
    from plait.weights.load import load

    checkpoint = open_checkpoint(model, strict)
    defaults = checkpoint.generation_defaults if with_defaults else {}
    check_defaults(checkpoint.path, defaults)
    decoder = load(checkpoint, dtype, device, strict)
    tokenizer = tokenizer or load_tokenizer(checkpoint.path)
    checkpoint.source.close()
    loaded = LoadedModel(decoder.config, _model_name(checkpoint.path), defaults, _decoder=decoder, _tokenizer=tokenizer)
    return _with_tokenizer(loaded, tokenizer)


def _with_tokenizer(loaded: LoadedModel, tokenizer: Tokenizer | None) -> LoadedModel:
    if tokenizer is not None:
        loaded.vocab_size, loaded.eos_token_ids = tokenizer.vocab_size, tokenizer.eos_token_ids
    return loaded


def _model_name(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def check_defaults(path: Path, defaults: dict[str, Any]) -> None:
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
