"""A checkpoint on disk: its configuration, its tensors and the map between them, whatever the format. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, UsageError
from plait.jsonfile import read_json
from plait.model.config import ModelConfig
from plait.model.families import family, parse_config
from plait.model.name_map import NameMap
from plait.model.quantisation import Quantisation, read_quantisation
from plait.weights.joined import joined
from plait.weights.locate import locate
from plait.weights.original_config import original_config
from plait.weights.quantised.source import quantised_source
from plait.weights.sources import TensorSource, open_source
from plait.weights.transposed import TransposedSource

_DIVISORS = "rope_freqs.weight"


@dataclass
class Checkpoint:
    """An opened checkpoint; tensors are read on demand.

    path: the file or directory that was opened. raw: its config.json dictionary (of GGUF the one that travels in the
    file, else one made from the metadata).
    config: the model's switches; what a GGUF file says in a tensor (divisors of the rotary frequencies) is in it too.
    read: the configuration as the files have it, None where nobody says. quantisation: what config.json says of it.
    """

    path: Path
    raw: dict[str, Any]
    config: ModelConfig
    source: TensorSource
    names: NameMap
    format: str
    read: ModelConfig | None = None
    quantisation: Quantisation | None = None

    @cached_property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling defaults that the checkpoint ships: temperature, top_p, top_k, repetition_penalty, ..."""
        return _generation_defaults(self)

    def with_config(self, **changes: Any) -> None:
        self.config = replace(self.config, **changes)


def open_checkpoint(model: str | Path | None, strict: bool = False) -> Checkpoint:
    """Open a GGUF file, a Hugging Face directory, `hf:OWNER/NAME` or (None) the default model. Reads headers only.

    A .safetensors file is opened alone, with the config.json of its directory. Raises ConfigError for what plait cannot
    carry out.
    """
    path = locate(model)
    if config_file(path) is not None:
        # The configuration is judged first: a family that is refused should say so even where tensors are odd too.
        raw = raw_config(path)
        config = parse_config(raw, strict)
        names, quantisation = family(config.model_type).names, read_quantisation(raw)
        opened = quantised_source(open_source(path), quantisation)
        if names.transposed:
            if quantisation is not None and quantisation.method != "mxfp4":
                raise ConfigError(f"{quantisation.method} checkpoints of {config.model_type} are not supported")
            opened = TransposedSource(opened, names.transposed)
        return Checkpoint(path, raw, config, opened, names, "safetensors", config, quantisation)
    from plait.weights.gguf_names import GGUF_NAMES

    source: Any = open_source(path)
    raw = raw_config(path, source)
    config = with_divisors(parse_config(raw, strict), source)
    original = original_config(source.metadata, config, strict)
    if original is not None:
        raw, config = dict(original.raw), original
    names = GGUF_NAMES[source.metadata["general.architecture"]]
    return Checkpoint(path, raw, config, joined(source, config), names, "gguf", config)


def read_config(model: str | Path | None, strict: bool = False) -> ModelConfig:
    """The configuration of a checkpoint (None: the default) or of a lone config.json; weights need not be there."""
    if model is not None and str(model).endswith(".json") and Path(model).is_file():
        return parse_config(read_json(Path(model)), strict)
    path = locate(model)
    if config_file(path) is not None:
        return parse_config(raw_config(path), strict)
    return open_checkpoint(path, strict).config


def config_file(path: Path) -> Path | None:
    """Where the config.json of a directory or of a .safetensors file belongs; None for a GGUF file."""
    if path.is_dir():
        return path / "config.json"
    return path.parent / "config.json" if path.suffix == ".safetensors" else None


def raw_config(path: Path, source: Any = None) -> dict[str, Any]:
    """The config.json dictionary of what is at `path`; of a GGUF file, which is given opened, from its metadata."""
    file = config_file(path)
    if file is None:
        from plait.weights.gguf_config import gguf_config

        raw = gguf_config(source.metadata, {name: source.info(name) for name in source.names()})
        if "longrope" in (raw.get("rope_scaling") or {}).values():
            from plait.weights.gguf_dense import FACTORS

            raw["rope_scaling"] |= {key: list(_positive_numbers(source, name)) for key, name in FACTORS.items()}
        return raw
    if not file.exists():
        raise UsageError(f"{file.parent} has no config.json; give a GGUF file or a Hugging Face directory")
    return read_json(file)


def with_divisors(config: ModelConfig, source: Any) -> ModelConfig:
    """The configuration with the rotary divisors that a GGUF file may hold as a tensor (llama3's scaling, computed).

    They concern the table of full attention, which is a family's first.
    """
    if _DIVISORS not in source.names():
        return config
    first, *others = config.rotary
    return replace(config, rotary=(replace(first, divisors=_positive_numbers(source, _DIVISORS)), *others))


def _positive_numbers(source: Any, name: str) -> tuple[float, ...]:
    """The values of a small F32 tensor of a GGUF file that divide frequencies."""
    info = source.info(name)
    if info.format != "F32":
        raise ConfigError(f"{info.file}: {name} is stored as {info.format}; only F32 is supported")
    numbers = tuple(source.file.raw(name).view("<f4").tolist())
    if not all(0 < number < inf for number in numbers):
        raise ConfigError(f"{info.file}: {name} must hold positive numbers")
    return numbers


_SAMPLING_KEYS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
GGUF_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
    "general.sampling.xtc_probability": "xtc_probability",
    "general.sampling.xtc_threshold": "xtc_threshold",
}


def _generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    directory = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    file = directory / "generation_config.json"
    if checkpoint.format == "gguf":
        data, keys = checkpoint.source.metadata, GGUF_SAMPLING_KEYS  # type: ignore[attr-defined]
    elif file.exists():
        data, keys = read_json(file), _SAMPLING_KEYS
    else:
        return {}
    return {ours: data.get(theirs) for theirs, ours in keys.items() if data.get(theirs) is not None}
