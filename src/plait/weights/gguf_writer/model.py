"""From a model to the metadata and tensors of its GGUF file; from a GGUF file to those of another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import PlaitError, TokenizerError
from plait.jsonfile import read_json_if_there
from plait.model.config import ModelConfig
from plait.model.families import parse_config
from plait.model.quantisation import without_quantisation
from plait.text.gguf_export import notes as tokenizer_notes
from plait.text.gguf_export import tokenizer_metadata
from plait.text.tokenizer import load_tokenizer
from plait.weights.checkpoint import GGUF_SAMPLING_KEYS
from plait.weights.encode import encode
from plait.weights.gguf_names import GGUF_NAMES
from plait.weights.gguf_source import GGUFSource
from plait.weights.gguf_types import TYPES_BY_NAME
from plait.weights.gguf_writer.architectures import architecture_keys, architecture_of, rotary_tensors
from plait.weights.gguf_writer.deepseek import SplitOutgoing, latent_notes
from plait.weights.gguf_writer.file import FileTensor
from plait.weights.gguf_writer.recipes import Choice, Model, choose_type, file_type
from plait.weights.hf_files import config_to_write
from plait.weights.original_config import CONFIG_KEY, DTYPES_KEY, GENERATION_KEY, first_difference
from plait.weights.rows import Outgoing, OutTensor, Parameters, Rows, stored_rows
from plait.weights.sources import TensorInfo

# Vectors in GGUF that are matrices of one row here.
SQUEEZED = (".ffn_gate_inp_shexp.weight",)
_PLAIN = ("F64", "F32", "F16", "BF16")
_TOKENIZER_OF_A_DIRECTORY = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")
# Keys of the source that the new file has its own values for, or that concern only the source's files.
_RENEWED = ("general.file_type", "general.quantization_version", "general.alignment", "general.architecture")
_SPLIT = "split."
_QUANTISATION_VERSION = 2

Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Changes = Mapping[str, Change]
_NO_CHANGES: Changes = {}


@dataclass
class GGUFContents:
    """What a file will hold. choices: the type of every tensor; copied: tensors whose bytes are the source's own;
    expanded: of quantised ones that are not, how many of each type; kept: quantised weights of several tensors whose
    numbers are in blocks now, by both formats; wanted otherwise: see `Choice`."""

    metadata: dict[str, Any]
    tensors: list[FileTensor] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)
    copied: int = 0
    expanded: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, tensor: FileTensor, choice: Choice, stored: frozenset[str], copied: bool, kept: bool = False) -> None:
        self.tensors.append(tensor)
        self.choices[tensor.name] = choice
        self.copied += copied
        if kept:
            self.kept.update(f"{kind} as {tensor.storage}" for kind in stored)
        elif not copied:
            self.expanded.update(kind for kind in stored if kind not in _PLAIN)

    def finish(self, type_name: str) -> GGUFContents:
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.storage] += tensor.nbytes
        self.metadata["general.quantization_version"] = _QUANTISATION_VERSION
        self.metadata["general.file_type"] = file_type(type_name, sizes)
        return self


def model_contents(
    config: ModelConfig,
    parameters: Parameters,
    type_name: str,
    *,
    source: Path | None,
    dtypes: Mapping[str, str],
    tokenizer: bool,
    threads: int,
) -> GGUFContents:
    """The GGUF file of a model.

    source: the directory that it came from, for its tokenizer and its name. dtypes: the storage of every tensor of the
    Hugging Face files, so that the way back restores it. tokenizer False: none is written. Raises ConfigError where the
    metadata cannot say what the model computes, TokenizerError where it cannot hold the tokenizer.
    """
    name = architecture_of(config)
    tables = rotary_tensors(config)
    outgoing = SplitOutgoing(Outgoing(parameters, config, GGUF_NAMES[name], SQUEEZED), config)
    infos = {t.name: TensorInfo(t.name, t.shape, "F32", 0, "", 0) for t in outgoing}
    infos |= {key: TensorInfo(key, table.shape, "F32", table.nbytes, "", 0) for key, table in tables.items()}
    contents = GGUFContents(architecture_keys(config, infos, tables))
    contents.metadata["general.type"] = "model"
    contents.metadata["general.name"] = _model_name(config, source)
    contents.notes += latent_notes(config)
    contents.metadata |= _tokenizer(config, source, contents, tokenizer)
    contents.metadata |= _origin(config, source, dtypes)
    experts = contents.metadata.get(f"{name}.expert_count", 0)
    model = Model(name, len(config.layers), experts, config.tie_embeddings)
    for key, table in tables.items():
        add = FileTensor(key, table.shape, "F32", lambda table=table: table.view(np.uint8))  # type: ignore[misc]
        contents.add(add, Choice("F32", "F32"), frozenset({"F32"}), True)
    for tensor in outgoing:
        choice = choose_type(type_name, tensor.name, tensor.shape, tensor.storage, model)

        def data(tensor: OutTensor = tensor, storage: str = choice.storage) -> NDArray[np.uint8]:
            return encoded(outgoing.read(tensor), storage, tensor.name, threads)

        file_tensor = FileTensor(tensor.name, tensor.shape, choice.storage, data)
        kept = tensor.made and choice.storage == tensor.storage and choice.storage not in _PLAIN
        contents.add(file_tensor, choice, tensor.stored, tensor.is_copied(choice.storage), kept)
    return contents.finish(type_name)


def copied_contents(
    source: GGUFSource, type_name: str, tokenizer: bool, threads: int, changes: Changes = _NO_CHANGES
) -> GGUFContents:
    """A GGUF file as another one of other types: every key and every tensor under its own name.

    changes: by tensor, its rows as numbers -> what they become; a quantised one is then F32 where no type is given.
    """
    metadata = source.metadata
    name = str(metadata["general.architecture"])
    contents = GGUFContents({"general.architecture": name})
    for key in metadata:
        if key in _RENEWED or key.startswith(_SPLIT) or (key.startswith("tokenizer.") and not tokenizer):
            continue
        contents.metadata |= _typed(key, metadata)
    if not tokenizer:
        contents.metadata["tokenizer.ggml.model"] = "none"
    names = source.names()
    model = Model(
        name,
        int(metadata.get(f"{name}.block_count", 0)),
        int(metadata.get(f"{name}.expert_count", 0)),
        "output.weight" not in names,
    )
    for key in names:
        info = source.info(key)
        change = changes.get(key)
        stored = info.format if change is None or info.format in _PLAIN else "F32"
        choice = choose_type(type_name, key, info.shape, stored, model)
        if info.format[0] == "I" and TYPES_BY_NAME[info.format].block_size == 1:
            choice = Choice(info.format, info.format)  # whole numbers are no weights

        def data(
            key: str = key, info: TensorInfo = info, storage: str = choice.storage, change: Change | None = change
        ) -> NDArray[np.uint8]:
            raw = source.raw(key)
            if storage == info.format and change is None:
                return raw
            rows = stored_rows(info.shape, info.format, raw, key)
            if change is not None:
                values = change(rows.floats(0, len(rows.lines())))
                rows = Rows(rows.shape, "F32", values.view(np.uint8).reshape(*rows.shape[:-1], -1))
            out = encoded(rows, storage, key, threads)
            source.release(key)
            return out

        tensor = FileTensor(key, info.shape, choice.storage, data)
        same = choice.storage == info.format and change is None
        contents.add(tensor, choice, frozenset({info.format}), same)
    return contents.finish(type_name)


def encoded(rows: Rows, storage: str, name: str, threads: int) -> NDArray[np.uint8]:
    """The bytes of a tensor as `storage`: its own where it is stored so, otherwise computed."""
    if rows.storage == storage and not rows.offset:
        return np.ascontiguousarray(rows.data).reshape(-1)
    if len(rows.shape) == 1:  # one row of many numbers instead of many rows of one
        count = rows.shape[0]
        return encode(lambda a, b: rows.floats(0, count).reshape(1, -1), 1, count, storage, name).reshape(-1)
    lines = rows.data.size // rows.data.shape[-1]
    return encode(rows.floats, lines, rows.columns, storage, name, threads).reshape(-1)


def _typed(key: str, metadata: Any) -> dict[str, Any]:
    """One pair with the type that it has in the source."""
    from gguf import GGUFValueType

    kind, *elements = (GGUFValueType(number).name for number in metadata.kinds[key])
    value = metadata[key]
    if not elements:
        return {key: (kind, value)}
    return {key: (f"{kind}:{elements[0]}", value)}


def _model_name(config: ModelConfig, source: Path | None) -> str:
    given = config.raw.get("_name_or_path")
    if isinstance(given, str) and Path(given).name:
        return Path(given).name
    if source is None:
        return config.model_type
    for part in source.parts:
        if part.startswith("models--"):  # huggingface_hub's cache: models--OWNER--NAME/snapshots/...
            return part.split("--")[-1]
    return (source if source.is_dir() else source.parent).resolve().name or config.model_type


def _tokenizer(config: ModelConfig, source: Path | None, contents: GGUFContents, wanted: bool) -> dict[str, Any]:
    """The tokenizer's keys; without one a file says that it has none."""
    none = {"tokenizer.ggml.model": "none"}
    if not wanted:
        return none
    directory = None if source is None else source if source.is_dir() or source.suffix == ".gguf" else source.parent
    if directory is None or not _has_tokenizer(directory):
        contents.notes.append("the source has no tokenizer: neither has the GGUF file")
        return none
    try:
        tokenizer = load_tokenizer(directory)
    except TokenizerError as error:
        raise TokenizerError(f"{error}; or convert without it (--no-tokenizer)") from error
    contents.notes += tokenizer_notes(tokenizer)
    return tokenizer_metadata(tokenizer, config.vocab_size, str(directory / "tokenizer.json"))


def _has_tokenizer(path: Path) -> bool:
    return path.suffix == ".gguf" or any((path / name).exists() for name in _TOKENIZER_OF_A_DIRECTORY)


def _origin(config: ModelConfig, source: Path | None, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """What restores the Hugging Face directory, and the sampling defaults in GGUF's own keys."""
    raw = config_to_write(config)
    keys: dict[str, Any] = {}
    try:
        told = first_difference(parse_config(raw), config) is None
    except PlaitError:
        told = False
    if told and dict(config.raw):
        plain = without_quantisation(config.raw)
        keys[CONFIG_KEY] = json.dumps(plain if _is_told(config) else raw, ensure_ascii=False)
    if dtypes:
        (default, _), *_ = Counter(dtypes.values()).most_common(1)
        others = {name: storage for name, storage in dtypes.items() if storage != default}
        keys[DTYPES_KEY] = json.dumps({"default": default, "others": others})
    if source is not None and source.is_dir():
        generation = read_json_if_there(source / "generation_config.json")
        if generation:
            keys[GENERATION_KEY] = json.dumps(generation, ensure_ascii=False)
        for theirs, ours in GGUF_SAMPLING_KEYS.items():
            value = generation.get(ours)
            if isinstance(value, int | float) and not isinstance(value, bool):
                keys[theirs] = ("INT32", int(value)) if ours == "top_k" else float(value)
    return keys


def _is_told(config: ModelConfig) -> bool:
    """Whether the configuration's own dictionary says all of it, as it stands."""
    try:
        return first_difference(parse_config(dict(config.raw)), config) is None
    except PlaitError:
        return False
