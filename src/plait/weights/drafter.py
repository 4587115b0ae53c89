"""Loads the layer of a checkpoint that predicts a further token (DeepSeek's multi-token prediction) as a `Drafter`.

Checkpoints hold it as a layer after the last: its norms `enorm` and `hnorm`, `eh_proj`, a decoder layer under the names
of any other, `shared_head.norm`, and copies of the embedding and of the head, which the decoder lends instead. Loading
a model without it skips all of these.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plait.errors import UsageError, WeightError
from plait.model.config import LayerSpec, ModelConfig
from plait.model.decoder import Decoder, Embedding, Head
from plait.model.drafter import Drafter
from plait.model.families import family
from plait.model.reader import ConfigReader
from plait.weights.arrange import LoadReport, same_numbers
from plait.weights.checkpoint import Checkpoint, open_checkpoint
from plait.weights.load import fill_parameters
from plait.weights.mapping import BoundMap
from plait.weights.sources import TensorInfo, TensorSource

_EMBEDDING, _HEAD = "embed_tokens.weight", "shared_head.head.weight"


def load_drafter(model: str | Path | Checkpoint | None, decoder: Decoder, index: int = 0) -> Drafter:
    """The drafter of a Hugging Face directory, for a decoder of the same model, in that one's dtype and on its device.

    Embedding and head are the decoder's own modules, unless the checkpoint's copies differ from its embedding and head.
    index: which of several such layers. Raises UsageError for an index, or a decoder, that does not belong to the
    checkpoint, WeightError where it has no such layer, or tensors of it are missing, unknown or of a wrong shape.
    """
    start = time.perf_counter()
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    config = checkpoint.config
    _check(checkpoint, decoder, index)
    number = len(config.layers) + index
    prefix = f"model.layers.{number}."
    source = _OneLayer(checkpoint.source, BoundMap(config, checkpoint.names), prefix)
    if not source.names():
        raise WeightError(
            f"{checkpoint.path} has no tensors {prefix}*: this {config.model_type} was saved without a layer that"
            " predicts a further token; the published checkpoint may have it"
        )
    layer = _layer(checkpoint, number)
    # The model with this layer too, so that the family's name map speaks of it; no layer of it is skipped.
    longer = replace(config, layers=(*config.layers, *[layer] * (index + 1)), next_token_layers=0)
    own, dropped = _copies(checkpoint, source, prefix)
    drafter = _build(longer, layer, decoder, own)
    shared = {id(parameter) for parameter in decoder.parameters()}
    parameters = {
        prefix + name.removeprefix("layer."): parameter
        for name, parameter in drafter.named_parameters()
        if id(parameter) not in shared
    }
    narrowed = replace(checkpoint, source=source, config=longer)
    report = LoadReport(str(checkpoint.path), checkpoint.format, str(decoder.dtype).removeprefix("torch."))
    with torch.no_grad():
        fill_parameters(parameters, narrowed, report, dropped)
    report.parameters = sum(p.numel() for p in parameters.values())
    report.weight_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
    report.notes += [f"{prefix}{name} is no copy of the decoder's: it is kept beside it" for name in own]
    report.seconds = time.perf_counter() - start
    drafter.load_report = report
    return drafter.eval()


def _check(checkpoint: Checkpoint, decoder: Decoder, index: int) -> None:
    config, given = checkpoint.config, decoder.config
    if checkpoint.format == "gguf":
        raise UsageError(f"{checkpoint.path}: a drafter is read from a Hugging Face directory, not from GGUF")
    ours, theirs = ((c.hidden_size, c.vocab_size, len(c.layers)) for c in (config, given))
    if ours != theirs:
        words = "hidden size {}, vocabulary {}, {} layers"
        raise UsageError(
            f"the decoder ({words.format(*theirs)}) is not of {checkpoint.path} ({words.format(*ours)}), whose drafter"
            " continues what that model knows"
        )
    if decoder.device.type == "meta":
        raise UsageError("a packed decoder computes nothing in torch: load the decoder with plait.load")
    if not 0 <= index < config.next_token_layers:
        count = config.next_token_layers
        raise UsageError(
            f"index={index}: {checkpoint.path} has {count} layer{'s' * (count != 1)} that predict further tokens,"
            " counted from 0"
        )


def _layer(checkpoint: Checkpoint, number: int) -> LayerSpec:
    """The switches of the layer of this number, were the model so long."""
    raw = {**checkpoint.config.raw, "num_hidden_layers": number + 1}
    found = family(checkpoint.config.model_type)
    # Not through parse_config, which would warn of unknown keys a second time.
    return found.build(ConfigReader(raw, checkpoint.config.model_type, False)).layers[number]


def _copies(checkpoint: Checkpoint, source: _OneLayer, prefix: str) -> tuple[list[str], list[str]]:
    """The names of embedding and head where the layer has numbers of its own, and its tensors that are only copies."""
    bound, names = BoundMap(checkpoint.config, checkpoint.names), checkpoint.source.names()
    own, copies = [], []
    for ours, theirs in ((_EMBEDDING, "model.embed_tokens.weight"), (_HEAD, "lm_head.weight")):
        copy = source.file_of(prefix + ours)
        if copy is None:
            continue
        original = bound.file_of(theirs, names) or bound.file_of("model.embed_tokens.weight", names)
        if original is not None and same_numbers(checkpoint.source, original, copy):
            copies.append(copy)
        else:
            own.append(ours)
    return own, copies


def _build(config: ModelConfig, layer: LayerSpec, decoder: Decoder, own: list[str]) -> Drafter:
    """With uninitialised parameters of its own, and the decoder's embedding and head but for what is in `own`."""
    vocab_size, hidden_size = config.vocab_size, config.hidden_size
    with torch.device("meta"):
        embedding = Embedding(vocab_size, hidden_size) if _EMBEDDING in own else decoder.model.embed_tokens
        head = Head(vocab_size, hidden_size, bias=False) if _HEAD in own else decoder.lm_head
        drafter = Drafter(config, layer, embedding, head)
    modules = [drafter.enorm, drafter.hnorm, drafter.eh_proj, drafter.layer, drafter.shared_head.norm]
    modules += [embedding] * (_EMBEDDING in own) + [head] * (_HEAD in own)
    for module in modules:
        module.to(decoder.dtype).to_empty(device=decoder.device)
    return drafter


class _OneLayer:
    """A TensorSource that has one layer's tensors of another one."""

    def __init__(self, source: TensorSource, bound: BoundMap, prefix: str) -> None:
        self.path: Path = source.path
        self._source = source
        self._names = {bound.without_prefix(name): name for name in source.names()}
        self._names = {ours: name for ours, name in self._names.items() if ours.startswith(prefix)}

    def names(self) -> list[str]:
        return list(self._names.values())

    def file_of(self, name: str) -> str | None:
        """What the file calls a tensor, None where there is none."""
        return self._names.get(name)

    def zero_biases(self) -> list[str]:
        """Those of a `QuantisedSource` that are this layer's."""
        own = set(self.names())
        return [name for name in getattr(self._source, "zero_biases", list)() if name in own]

    def info(self, name: str) -> TensorInfo:
        return self._source.info(name)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._source.read(name, dtype)

    def raw(self, name: str) -> NDArray[np.uint8]:
        return self._source.raw(name)

    def release(self, name: str) -> None:
        self._source.release(name)

    def close(self) -> None:
        self._source.close()
