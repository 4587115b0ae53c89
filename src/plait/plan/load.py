"""From a checkpoint to what the native plan runs: configuration, recording and packed weights, with the tokenizer's
figures. All of it comes from the cache where an earlier process put it there. No torch."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait import cachefile
from plait.errors import ConfigError, PlaitError, TokenizerError
from plait.model.config import ModelConfig
from plait.ops.recording import Recording
from plait.plan import cache
from plait.plan.recorder import Recorder, describe, is_described, make_config
from plait.weights.arrange import LoadReport, dtype_name, settle_head
from plait.weights.checkpoint import Checkpoint, open_checkpoint
from plait.weights.locate import locate
from plait.weights.pack import Packing, plan_packing
from plait.weights.store import WeightStore, need_library

if TYPE_CHECKING:
    from plait.model.decoder import Decoder
    from plait.text.tokenizer import Tokenizer

log = logging.getLogger("plait.load")


@dataclass
class NativeModel:
    """What a native plan is built from, and what came with it.

    path: the checkpoint. defaults: its own sampling parameters, None where they cannot be read. vocab_size,
    eos_token_ids: the tokenizer's, which need not be built for them; None and nothing where there is no tokenizer.
    cached: whether all of it came from the cache.
    """

    path: Path
    config: ModelConfig
    recording: Recording
    store: WeightStore
    report: LoadReport
    defaults: dict[str, Any] | None = None
    vocab_size: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    cached: bool = False

    def read_defaults(self) -> dict[str, Any]:
        """The checkpoint's own sampling parameters. Raises PlaitError where they cannot be read."""
        return open_checkpoint(self.path).generation_defaults if self.defaults is None else self.defaults

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, built when it is first asked for. Raises TokenizerError."""
        from plait.text.tokenizer import load_tokenizer

        return load_tokenizer(self.path)

    @cached_property
    def decoder(self) -> Decoder:
        """A decoder of shapes: its state_dict() and save_pretrained() read the packed weights. Imports torch."""
        from plait.weights.packed import packed_decoder

        return packed_decoder(self.config, self.store, self.path)


def load_native(
    model: str | Path | Checkpoint | None = None,
    *,
    dtype: object = "auto",
    threads: int | None = None,
    strict: bool = False,
    use_cache: bool = True,
) -> NativeModel:
    """Pack a checkpoint for the native kernels, or map what an earlier process packed of the same files.

    model: None (the default model), a path, `hf:OWNER/NAME` or an opened Checkpoint. dtype: "auto" keeps weights as
    they are stored, "fp32", "bf16" and "fp16" expand or round them. threads: for packing; default all that may be used.
    Raises NativeLibraryError without the native library, else what `plait.load` raises.
    """
    start = time.perf_counter()
    need_library()
    name = dtype_name(dtype)
    path = model.path if isinstance(model, Checkpoint) else locate(model)
    digest = config_digest(model) if isinstance(model, Checkpoint) else ""
    use_cache = use_cache and digest is not None and cachefile.directory() is not None
    key = cache.key(path, name, digest or "") if use_cache else None
    native = None if key is None else _from_cache(path, name, key, strict)
    if native is None:
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(path, strict)
        native = _from_checkpoint(checkpoint, name, threads, key)
    native.report.seconds = time.perf_counter() - start
    return native


def config_digest(checkpoint: Checkpoint) -> str | None:
    """A digest of a configuration that was changed, "" for the files' own; None for one that cannot be described."""
    config = checkpoint.config
    if config == checkpoint.read:
        return ""
    if not is_described(config):
        return None
    return hashlib.blake2b(json.dumps(describe(config), sort_keys=True).encode(), digest_size=16).hexdigest()


def _from_cache(path: Path, dtype: str, key: Mapping[str, Any], strict: bool) -> NativeModel | None:
    entry = cache.read(path, dtype, key)
    if entry is None:
        return None
    try:
        native = _from_entry(path, entry, strict)
    except ConfigError:  # the checkpoint itself will say it
        return None
    except (PlaitError, ValueError, KeyError, TypeError, AttributeError) as error:
        cache.say_unfit(cache.entry_name(path, dtype, key), error)
        return None
    for line in entry.facts["warnings"]:
        log.warning("%s", line)
    return native


def _from_entry(path: Path, entry: cache.CachedModel, strict: bool) -> NativeModel:
    facts = entry.facts
    return NativeModel(
        path,
        make_config(facts["model"], strict),
        Recording.from_json(facts["recording"]),
        entry.store,
        entry.store.report,
        facts["defaults"],
        facts["vocab_size"],
        frozenset(facts["eos_token_ids"]),
        cached=True,
    )


def _from_checkpoint(
    checkpoint: Checkpoint, dtype: str, threads: int | None, key: Mapping[str, Any] | None
) -> NativeModel:
    warnings: list[str] = []
    dropped = settle_head(checkpoint, warnings.append)
    for line in warnings:
        log.warning("%s", line)
    with Recorder(checkpoint.config) as recorder:
        tokens = _token_facts(checkpoint.path)
        recording = recorder.result()
    shapes = {ref.name: ref.shape for ref in recording.weights()}
    packing = plan_packing(checkpoint, shapes, dtype, dropped)
    facts = {
        "model": describe(checkpoint.config),
        "recording": recording.to_json(),
        "defaults": _defaults(checkpoint),
        "warnings": warnings,
        **tokens,
    }
    store = _pack(packing, dtype, threads, key, facts)
    return NativeModel(
        checkpoint.path,
        checkpoint.config,
        recording,
        store,
        store.report,
        facts["defaults"],
        tokens["vocab_size"],
        frozenset(tokens["eos_token_ids"]),
    )


def _pack(
    packing: Packing, dtype: str, threads: int | None, key: Mapping[str, Any] | None, facts: dict[str, Any]
) -> WeightStore:
    """Into an entry of the cache, whose pages then are the weights, or into memory where that does not work."""
    if key is not None:
        try:
            return cache.write(packing, dtype, threads, key, facts)
        except OSError as error:
            cachefile.say_unwritten(error)
    return WeightStore({weight.name: weight for weight in packing.weights(threads)}, packing.report)


def _defaults(checkpoint: Checkpoint) -> dict[str, Any] | None:
    try:
        return checkpoint.generation_defaults
    except PlaitError:  # whoever wants them is told then
        return None


def _token_facts(path: Path) -> dict[str, Any]:
    from plait.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except TokenizerError:  # whoever needs it is told then
        return {"vocab_size": None, "eos_token_ids": []}
    return {"vocab_size": tokenizer.vocab_size, "eos_token_ids": sorted(tokenizer.eos_token_ids)}
