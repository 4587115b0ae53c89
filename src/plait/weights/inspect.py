"""Facts about a checkpoint from its headers alone: no tensor is read, torch is not imported."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from heapq import nsmallest
from math import prod
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, PlaitError
from plait.jsonfile import read_json_if_there
from plait.kernels.native import available_memory_bytes
from plait.memory.layout import make_layout
from plait.model.config import ModelConfig
from plait.model.describe import describe
from plait.model.families import parse_config
from plait.model.kv_arithmetic import CHUNK_TOKENS
from plait.model.quantisation import read_quantisation
from plait.weights.checkpoint import config_file, raw_config, with_divisors
from plait.weights.locate import locate
from plait.weights.quantised.source import check_plain, collect
from plait.weights.sources import TensorInfo, TensorSource, open_source

_GGUF_TOKENIZER = "tokenizer.ggml."
_OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "vocab.json")
BYTES = {"bf16": 2, "fp32": 4}


def inspect_checkpoint(model: str | Path | None, strict: bool = False) -> dict[str, Any]:
    """Everything `plait inspect` shows, as one JSON document.

    A configuration that plait cannot carry out is no error here: `supported` is False and `problem` says why.
    """
    with _no_collection():
        return _inspect(locate(model), strict)


def _inspect(path: Path, strict: bool) -> dict[str, Any]:
    source = open_source(path)
    document: dict[str, Any] = {"path": str(path), "format": "gguf" if hasattr(source, "metadata") else "safetensors"}
    config, raw, problem = _configuration(path, source, strict)
    document |= {"supported": config is not None, "problem": problem}
    document["config"] = _config_facts(config, raw)
    infos = [source.info(name) for name in source.names()]
    document["quantisation"], quantisation_problem = _quantisation_facts(source, infos, raw)
    if document["supported"] and quantisation_problem is not None:
        document |= {"supported": False, "problem": quantisation_problem}
    document["tensors"] = _tensor_facts(infos)
    document["tokenizer"] = _tokenizer_facts(path, source)
    document["chat_template"] = _chat_template(path, source)
    document["memory"] = _memory_facts(config, document["tensors"])
    return document


def tensor_table(model: str | Path | None) -> list[dict[str, Any]]:
    """Every tensor with name, shape, format and bytes, in the file's order."""
    source = open_source(locate(model))
    infos = (source.info(name) for name in source.names())
    return [{"name": i.name, "shape": list(i.shape), "format": i.format, "bytes": i.nbytes} for i in infos]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Headers become very many small objects that all stay: looking for garbage meanwhile only costs time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Configuration


def _configuration(
    path: Path, source: Any, strict: bool
) -> tuple[ModelConfig | None, dict[str, Any] | None, str | None]:
    """The configuration, its dictionary, and what is wrong where there is none."""
    raw: dict[str, Any] | None = None
    try:
        raw = raw_config(path, source)
        config = parse_config(raw, strict)
        return (config if config_file(path) is not None else with_divisors(config, source)), raw, None
    except PlaitError as error:
        return None, raw, str(error)


def _config_facts(config: ModelConfig | None, raw: Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        # Not understood: the plain values as they stand.
        plain = {k: v for k, v in (raw or {}).items() if isinstance(v, (str, int, float, bool))}
        return {"model_type": (raw or {}).get("model_type"), "raw": plain}
    return {
        "model_type": config.model_type,
        "switches": [list(line) for line in describe(config)],
        "parameters": config.param_counts(),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
        "max_positions": config.max_positions,
    }


def _quantisation_facts(
    source: TensorSource, infos: list[TensorInfo], raw: Mapping[str, Any] | None
) -> tuple[dict[str, Any] | None, str | None]:
    """What config.json says of quantised weights and how many there are, and what is wrong with that."""
    if hasattr(source, "metadata") or not isinstance(raw, Mapping):
        return None, None
    try:
        quantisation = read_quantisation(raw)
        if quantisation is None:
            check_plain(source)
            return None, None
        with _no_collection():
            weights, unused = collect(infos, quantisation)
    except PlaitError as error:
        return None, str(error)
    counts = {"weights": len(weights), "unused": len(unused)}
    return {"method": quantisation.method, "title": quantisation.title, **counts}, None


# Tensors


def _tensor_facts(infos: list[TensorInfo]) -> dict[str, Any]:
    """Counts and bytes by storage format, and the largest tensors."""
    by_format: dict[str, list[TensorInfo]] = {}
    for info in infos:
        by_format.setdefault(info.format, []).append(info)
    formats = {}
    for name, group in by_format.items():
        shapes = Counter([info.shape for info in group])  # a large checkpoint has few
        numbers = sum(prod(shape) * count for shape, count in shapes.items())
        formats[name] = {"tensors": len(group), "numbers": numbers, "bytes": sum([info.nbytes for info in group])}
    largest = nsmallest(5, infos, key=lambda info: -info.nbytes)
    return {
        "count": len(infos),
        "numbers": sum(entry["numbers"] for entry in formats.values()),
        "bytes": sum(entry["bytes"] for entry in formats.values()),
        "files": len({info.file for info in infos}),
        "formats": dict(sorted(formats.items(), key=lambda item: -item[1]["bytes"])),
        "largest": [{"name": i.name, "shape": list(i.shape), "format": i.format, "bytes": i.nbytes} for i in largest],
    }


# Tokenizer and template


def _tokenizer_facts(path: Path, source: TensorSource) -> dict[str, Any] | None:
    metadata = getattr(source, "metadata", None)
    if metadata is not None:
        return _gguf_tokenizer(metadata)
    directory = path if path.is_dir() else path.parent
    file = directory / "tokenizer.json"
    if not file.is_file():
        if not any((directory / name).exists() for name in _OTHER_TOKENIZERS):
            return None
        from plait.text.tokenizer_files import facts_of_files

        facts = facts_of_files(directory)
        return None if facts is None else facts | _settings(directory)
    return _json_tokenizer(file) | _settings(directory)


def _gguf_tokenizer(metadata: Any) -> dict[str, Any] | None:
    if f"{_GGUF_TOKENIZER}model" not in metadata:
        return None

    def count(key: str) -> int | None:
        return metadata.array_length(_GGUF_TOKENIZER + key) if _GGUF_TOKENIZER + key in metadata else None

    def value(key: str) -> Any:
        return metadata.get(_GGUF_TOKENIZER + key)

    return {
        "kind": value("model"),
        "pre_tokenizer": value("pre"),
        "tokens": count("tokens"),
        "merges": count("merges"),
        "bos_token_id": value("bos_token_id"),
        "eos_token_id": value("eos_token_id"),
        "add_bos_token": value("add_bos_token"),
    }


def _json_tokenizer(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        model, added = data["model"], data.get("added_tokens") or []
        vocabulary = model.get("vocab") or ()
        largest = max((token["id"] for token in added), default=-1) + 1
        return {
            "kind": model.get("type"),
            "pre_tokenizer": (data.get("pre_tokenizer") or {}).get("type"),
            "tokens": max(len(vocabulary), largest),
            "merges": len(model["merges"]) if "merges" in model else None,
            "special_tokens": [token["content"] for token in added if token.get("special")][:16],
        }
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        return {"kind": None, "problem": f"{file.name} cannot be read: {error}"}


def _settings(directory: Path) -> dict[str, Any]:
    settings = _optional_json(directory / "tokenizer_config.json")

    def text(name: str) -> Any:
        token = settings.get(name)
        return token.get("content") if isinstance(token, dict) else token

    return {
        "bos_token": text("bos_token"),
        "eos_token": text("eos_token"),
        "add_bos_token": settings.get("add_bos_token"),
    }


def _chat_template(path: Path, source: TensorSource) -> str | None:
    """The template's own text."""
    metadata = getattr(source, "metadata", None)
    if metadata is not None:
        return metadata.get("tokenizer.chat_template")
    directory = path if path.is_dir() else path.parent
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = _optional_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list | dict):
        entries = template if isinstance(template, list) else []
        named = template if isinstance(template, dict) else {}
        named = named | {t.get("name"): t.get("template") for t in entries if isinstance(t, dict)}
        return named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _optional_json(file: Path) -> dict[str, Any]:
    try:
        return read_json_if_there(file)
    except ConfigError:
        return {}


# Memory


def _memory_facts(config: ModelConfig | None, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of the weights as stored and expanded, of a token and of a full context, and what fits here."""
    expanded = tensors["numbers"]
    available = available_memory_bytes()
    facts: dict[str, Any] = {
        "weights_stored_bytes": tensors["bytes"],
        "weights_bytes": {name: expanded * size for name, size in BYTES.items()},
        "available_bytes": available,
    }
    if config is None:
        return facts
    parameters = config.param_counts()["total"]
    facts["weights_bytes"] = {name: parameters * size for name, size in BYTES.items()}
    facts["kv_bytes_per_token"] = {name: config.kv_bytes_per_token(size) for name, size in BYTES.items()}
    context = config.max_positions
    layout = make_layout(config.caches(), BYTES["bf16"], context, min(CHUNK_TOKENS, context))
    request = layout.blocks_per_sequence(context, min(CHUNK_TOKENS, context)) * layout.block_bytes
    left = available - facts["weights_bytes"]["bf16"]
    return facts | {
        "context_tokens": context,
        "kv_bytes_per_full_request": request,
        "full_requests_beside_bf16_weights": max(left, 0) // request,
    }
