"""A checkpoint on disk: its configuration, its tensors and the map between them, whatever the format. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, UsageError
from plait.model.config import ModelConfig
from plait.model.families import family, parse_config
from plait.model.name_map import NameMap
from plait.weights.locate import locate
from plait.weights.sources import TensorSource


@dataclass
class Checkpoint:
    """An opened checkpoint; tensors are read on demand.

    path: the GGUF file or the directory. raw: its config.json dictionary (made from the metadata for GGUF).
    """

    path: Path
    raw: dict[str, Any]
    source: TensorSource
    names: NameMap
    format: str
    strict: bool = False

    @cached_property
    def config(self) -> ModelConfig:
        """The model's switches; raises ConfigError for what plait cannot carry out."""
        return parse_config(self.raw, self.strict)

    @cached_property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling defaults that the checkpoint ships: temperature, top_p, top_k, repetition_penalty, ..."""
        return _generation_defaults(self)

    def with_config(self, **changes: Any) -> None:
        self.__dict__["config"] = replace(self.config, **changes)


def open_checkpoint(model: str | Path | None, strict: bool = False) -> Checkpoint:
    """Open a GGUF file, a Hugging Face directory, `hf:OWNER/NAME` or (None) the default model. Reads headers only."""
    path = locate(model)
    if path.is_dir():
        return _open_directory(path, strict)
    if path.suffix == ".safetensors" and (path.parent / "config.json").exists():
        return _open_directory(path.parent, strict)
    return _open_gguf(path, strict)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError where it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def _open_directory(path: Path, strict: bool) -> Checkpoint:
    from plait.weights.safetensors_source import SafetensorsSource

    config = path / "config.json"
    if not config.exists():
        raise UsageError(f"{path} has no config.json; give a GGUF file or a Hugging Face directory")
    raw = read_json(config)
    # The configuration is judged first: a family that is refused should say so even where tensors are odd too.
    model_type = parse_config(raw, strict).model_type
    return Checkpoint(path, raw, SafetensorsSource(path), family(model_type).names, "safetensors", strict)


def _open_gguf(path: Path, strict: bool) -> Checkpoint:
    from plait.weights.gguf_config import gguf_config
    from plait.weights.gguf_names import GGUF_NAMES
    from plait.weights.gguf_source import GGUFSource

    source = GGUFSource(path)
    metadata: Mapping[str, Any] = source.metadata
    raw = gguf_config(metadata, {name: source.info(name) for name in source.names()})
    return Checkpoint(path, raw, source, GGUF_NAMES[metadata["general.architecture"]], "gguf", strict)


_SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


def _generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.format == "gguf":
        names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        metadata = checkpoint.source.metadata  # type: ignore[attr-defined]
        found = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
        return {k: v for k, v in found.items() if v is not None}
    file = checkpoint.path / "generation_config.json"
    if not file.exists():
        return {}
    data = read_json(file)
    found = {k: data[k] for k in _SAMPLING_KEYS if data.get(k) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found
