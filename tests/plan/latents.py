"""A recording of latent attention in which every width differs, and stores that hold its second layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.ops.recording import Recording, Value, WeightRef
from plait.ops.spec import LatentSpec, LayerCache
from plait.ops.symbolic import Recorder
from plait.plan.lower_ops import ATTEND_COST
from plait.weights.latent import make_second
from plait.weights.store import WeightStore
from tests.plan.models import packed

WIDTH, VOCABULARY = 64, 50
# Sequences of Script's lengths take both forms.
SPECS = (LatentSpec(2, 64, 16, 12, 48, 0.21), LatentSpec(2, 32, 32, 12, 16, 0.17))
__all__ = ["ATTEND_COST", "SPECS", "VOCABULARY", "WIDTH", "latents", "with_second"]


def latents(form: str = "auto", specs: tuple[LatentSpec, ...] = SPECS) -> tuple[Recording, dict[str, torch.Tensor]]:
    """The recording and its weights: two layers of attention, of latents that lie apart and of a part of a row."""
    generator = torch.Generator().manual_seed(5)
    weights: dict[str, torch.Tensor] = {}

    def weight(*shape: int) -> WeightRef:
        name = f"w{len(weights)}"
        weights[name] = torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 3)
        return WeightRef(name, shape, "float32")

    r = Recorder({})
    ids, positions = r.input("ids", Value(("N",), "i64")), r.input("positions", Value(("N",), "i64"))
    rows = r.input("logit_rows", Value(("R",), "i64"))
    x = r.emit("embed", (ids,), (weight(VOCABULARY, WIDTH),), scale=2.0, round_scale=False)
    angles = r.emit("positions", (positions,), inv_freq=[0.9, 0.4, 0.2, 0.1, 0.05, 0.02], magnitude=1.0)
    caches = []
    for layer, spec in enumerate(specs):
        caches.append(LayerCache(1, spec.row_width, 0))
        y = r.emit("rms_norm", (x,), (weight(WIDTH),), eps=1e-6, unit_offset=False, fp32_weight=False)
        q = r.emit("linear", (y,), (weight(spec.num_heads * spec.key_width, WIDTH), None))
        q = r.emit("view", (q,), tail=(spec.num_heads, spec.key_width), drop=1)
        if layer:
            c = r.emit("linear", (y,), (weight(spec.latent_width, WIDTH), None))
            k = r.emit("linear", (y,), (weight(spec.rope_width, WIDTH), None))
        else:
            both = r.emit("linear", (y,), (weight(spec.row_width, WIDTH), None))
            c, k = r.emit("split", (both,), sizes=(spec.latent_width, spec.rope_width))
        c = r.emit("rms_norm", (c,), (weight(spec.latent_width),), eps=1e-6, unit_offset=False, fp32_weight=False)
        k = r.emit("view", (k,), tail=(1, spec.rope_width), drop=1)
        how: dict[str, Any] = {"width": spec.rope_width, "pairing": ("adjacent", "halves")[layer], "fp32": "nothing"}
        q, k = r.emit("rotate", (q, angles), start=spec.nope_width, **how), r.emit("rotate", (k, angles), **how)
        made = weight(spec.num_heads * (spec.nope_width + spec.value_width), spec.latent_width)
        attrs = {"layer": layer, "spec": spec.to_json() | {"form": form}}
        a = r.emit("attend_latent", (q, c, k), (made,), **attrs)
        a = r.emit("view", (a,), tail=(spec.num_heads * spec.value_width,), drop=2)
        x = r.emit("add", (x, r.emit("linear", (a,), (weight(WIDTH, spec.num_heads * spec.value_width), None))))
    logits = r.emit("logits", (r.emit("select_rows", (x, rows)),), (weight(VOCABULARY, WIDTH),))
    return r.recording({"hidden": x, "logits": logits}, tuple(caches)), weights


def with_second(
    weights: dict[str, torch.Tensor], recording: Recording, form: str | Callable[[str], str]
) -> WeightStore:
    """A packed store of the weights, whose own numbers become what is packed, with the second layouts."""
    store = packed(weights, form)
    for name in weights:
        weights[name] = torch.from_numpy(store.expand(name))
    for op in recording.ops:
        if op.name == "attend_latent":
            (ref,) = op.weights
            assert ref is not None
            store.add(make_second(store[ref.name], LatentSpec(**op.attrs["spec"]), 1))
    return store
