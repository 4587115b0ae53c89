"""Decoders and stand-in weight stores for the tests of plans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from plait.memory.layout import CacheLayout, make_layout
from plait.model.config import LatentAttentionSpec, ModelConfig, keeps_float32
from plait.model.decoder import Decoder, from_config
from plait.model.rope import rotary_table
from plait.ops.recording import Recording, Value, WeightRef
from plait.ops.spec import LayerCache
from plait.ops.symbolic import Recorder
from plait.weights.latent import fits, latent_weights, make_second
from plait.weights.pack import is_vector
from plait.weights.store import stack_parts
from tests.configs import CONFIGS
from tests.parity.cases import CASES

# Every configuration of the parity tests, and those that the recording tests use.
ALL = {str(case): {"initializer_range": 0.15, **case.raw} for case in CASES} | CONFIGS


def slow_but(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, all marked slow but for some."""
    return [v if v in fast else pytest.param(v, marks=pytest.mark.slow) for v in values]


def without_kernel(config: ModelConfig) -> set[str]:
    """The operations of a model that have no native form: the load report names them."""
    found = set()
    for attention in (layer.attention for layer in config.layers):
        if isinstance(attention, LatentAttentionSpec):
            if not fits(attention.attend):
                found.add("attend_latent")
            if attention.latent_width % 16:
                found.add("split")
    if any(rotary_table(table).long_inv_freq for table in config.rotary):
        found.add("positions_by_reach")
    return found


@dataclass(frozen=True)
class PlainWeight:
    """A weight that says it is packed; for lowering and the numpy model, which need no library."""

    name: str
    numbers: np.ndarray
    layout: str
    parts: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def expand(self) -> np.ndarray:
        return self.numbers


def plain_store(decoder: Decoder, layout: str | Callable[[str], str] = "F32") -> dict[str, PlainWeight]:
    """layout: of the matrices, or a function of their names."""
    parameters = dict(decoder.named_parameters())
    forms = layouts_of(parameters, layout)
    parts = stack_parts({name: tuple(p.shape) for name, p in parameters.items()})
    return {
        name: PlainWeight(name, parameter.detach().numpy(), forms[name], parts.get(name, 1))
        for name, parameter in parameters.items()
    }


def layouts_of(tensors: Mapping[str, torch.Tensor], layout: str | Callable[[str], str]) -> dict[str, str]:
    """The layout of every tensor: vectors, routers in float32, and for the others what is asked for."""
    forms = {}
    for name, tensor in tensors.items():
        form = layout if isinstance(layout, str) else layout(name)
        forms[name] = "VECTOR" if is_vector(name, tensor.ndim) else "F32" if keeps_float32(name) else form
    return forms


def quantised_store(decoder: Decoder, form: str | Callable[[str], str]):
    """A packed store of the decoder's weights as GGUF's reference rounds them; the decoder is given those numbers.

    form: the quantised layout of the matrices, or a function of their names; "F32" leaves one as it is.
    """
    store = packed({name: p.detach() for name, p in decoder.named_parameters()}, form)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(torch.from_numpy(store.expand(name)))
    for name, spec in latent_weights(decoder.config, store).items():
        store.add(make_second(store[name], spec, 1))
    return store


def packed(tensors: dict[str, torch.Tensor], form: str | Callable[[str], str] = "F32"):
    """A packed store of tensors. form: the layout of the matrices, or a function of their names."""
    from gguf import GGMLQuantizationType, quantize

    from plait.weights.fill import Source, fill
    from plait.weights.store import PackedWeight, WeightStore, aligned_bytes, packed_bytes

    weights = {}
    layouts = layouts_of(tensors, form)
    parts = stack_parts({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        layout, count = layouts[name], parts.get(name, 1)
        shape, numbers = tuple(tensor.shape), tensor.numpy()
        data = aligned_bytes(packed_bytes(layout, shape, count))
        weights[name] = PackedWeight(name, shape, layout, data, count)
        if layout == "VECTOR":
            weights[name].vector()[:] = numbers
        else:
            raw = np.ascontiguousarray(quantize(numbers.reshape(-1, shape[-1]), GGMLQuantizationType[layout]))
            fill(weights[name], Source(layout, raw.ctypes.data, raw.strides[0]), None, 1)
    return WeightStore(weights)


def make(raw: dict, seed: int = 3) -> Decoder:
    """A decoder whose norms and biases are not the identity either, so that a dropped one shows."""
    decoder = from_config(raw, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return decoder


def layout_of(decoder: Decoder, bytes_per_number: int = 4) -> CacheLayout:
    """Blocks of 16 tokens for the widest layers, so that half of one, which narrower layers are cut by, is 8."""
    return make_layout(decoder.config.caches(), bytes_per_number, context_tokens=384, chunk_tokens=384)


def every_attribute() -> tuple[Recording, dict[str, torch.Tensor]]:
    """A recording in which every attribute of every operation has an uncommon value, and its weights.

    One layer with two key/value heads of width 6, windowed.
    """
    generator = torch.Generator().manual_seed(5)
    weights: dict[str, torch.Tensor] = {}

    def weight(*shape: int, name: str = "") -> WeightRef:
        name = f"w{len(weights)}.{name}"
        weights[name] = torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 3)
        return WeightRef(name, shape, "float32")

    r = Recorder({})
    ids, positions = r.input("ids", Value(("N",), "i64")), r.input("positions", Value(("N",), "i64"))
    rows = r.input("logit_rows", Value(("R",), "i64"))
    x = r.emit("embed", (ids,), (weight(50, 24),), scale=1.7, round_scale=False)
    table = weight(390, 24)
    x = r.emit("add", (x, r.emit("embed", (positions,), (table,), scale=0.6, round_scale=False, offset=3)))
    angles = r.emit("positions", (positions,), inv_freq=[0.9, 0.13], magnitude=1.2)
    y = r.emit("rms_norm", (x,), (weight(24),), eps=0.1, unit_offset=True, fp32_weight=True)
    q, k, v = (r.emit("linear", (y,), (weight(n, 24), weight(n))) for n in (24, 12, 12))
    q, k, v = (r.emit("view", (s,), tail=(h, 6), drop=1) for s, h in ((q, 4), (k, 2), (v, 2)))
    q = r.emit("head_norm", (q,), (weight(6),), eps=0.2, unit_offset=True, fp32_weight=False)
    k = r.emit("layer_norm", (k,), (weight(6), weight(6)), eps=0.3)
    v = r.emit("layer_norm", (v,), (weight(2, 6, name="v_norm.weight"), None), eps=0.2)
    v = r.emit("layer_norm", (v,), (weight(2, 6, name="w_norm.weight"), weight(2, 6, name="bias")), eps=0.1)
    q = r.emit("rotate", (q, angles), width=4, pairing="adjacent")
    k = r.emit("rotate", (k, angles), width=4, pairing="halves")
    sizes = {"num_heads": 4, "num_kv_heads": 2, "key_width": 6, "value_width": 6}
    a = r.emit("attend", (q, k, v), (weight(4),), layer=0, spec={**sizes, "scale": 0.8, "window": 5, "soft_cap": 1.5})
    a = r.emit("view", (a,), tail=(24,), drop=2)
    a = r.emit("scale", (a,), factor=-1.3)
    a = r.emit("add", (x, r.emit("linear", (a,), (weight(24, 24), weight(24)))))
    a = r.emit("layer_norm", (a,), (None, None), eps=0.05)
    b = r.emit("gate", (a, r.emit("clip", (a,), limit=0.7)), kind="gelu")
    b = r.emit("gate", (r.emit("linear", (b,), (weight(40, 24), weight(40))),) * 2, kind="sigmoid")
    g, u = (r.emit("linear", (b,), (weight(36, 40), weight(36))) for _ in range(2))
    b = r.emit("gate", (g, u), kind="clamped_swiglu", alpha=1.4, limit=0.7)
    b = r.emit("gate", (b, r.emit("xielu", (b,), (weight(1), weight(1), weight(1), weight(1)))), kind="silu")
    b = r.emit("gate", (b, b), kind="clamped_swiglu", alpha=0.8, limit=0.2)
    b = r.emit("activate", (r.emit("linear", (b,), (weight(20, 36), None)),), kind="relu_squared")
    b = r.emit("soft_cap", (r.emit("linear", (b,), (weight(24, 20), None)),), limit=2.5)
    hidden = r.emit("add", (r.emit("rms_norm", (b,), (None,), eps=0.5, unit_offset=False, fp32_weight=False), a))
    logits = r.emit("logits", (r.emit("select_rows", (hidden, rows)),), (weight(50, 24), weight(50)))
    logits = r.emit("soft_cap", (logits,), limit=3.5)
    caches = (LayerCache(2, 6, 6, 5),)
    return r.recording({"hidden": hidden, "logits": logits}, caches), weights
