"""A recording of mixtures in which every attribute of routing and of experts has an uncommon value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from plait.ops.recording import Op, Recording, Value, WeightRef
from plait.ops.spec import LayerCache, RouterSpec
from plait.ops.symbolic import Recorder

WIDTH, INNER, VOCABULARY = 64, 32, 50
ROUTERS = (
    RouterSpec(12, 3, "sigmoid", "always", 2.5, 4, 2, "two_best", "zero"),
    RouterSpec(7, 7, "topk_softmax", "never", 1.0),
    RouterSpec(8, 2, "sparse_mixer", scale=1.5, jitter=0.3),
    RouterSpec(9, 3, "sigmoid", "always", least_sum=1.9),
    RouterSpec(6, 1, "softmax", "several", 0.5, 3, 1, "best", "minus_infinity"),
)


def mixtures() -> tuple[Recording, dict[str, torch.Tensor]]:
    """The recording and its weights: one layer of attention between five mixtures. The first four are computed for all
    tokens, the last for those whose logits are wanted."""
    generator = torch.Generator().manual_seed(5)
    weights: dict[str, torch.Tensor] = {}

    def weight(*shape: int, name: str = "") -> WeightRef:
        name = f"{len(weights)}.{name or 'weight'}"
        scale = shape[-1] ** -0.5 if len(shape) > 1 and not name.endswith("bias") else 0.3
        weights[name] = torch.randn(shape, generator=generator) * scale
        return WeightRef(name, shape, "float32")

    r = Recorder({})
    ids, rows = r.input("ids", Value(("N",), "i64")), r.input("logit_rows", Value(("R",), "i64"))
    r.input("positions", Value(("N",), "i64"))

    def mixture(x: Any, spec: RouterSpec, biased: bool, gated: bool, kind: str, **numbers: float) -> Any:
        """x and what its experts give; beside them a shared product that one number of each token gates."""
        e, biases = spec.num_experts, biased or None
        given = r.emit("rms_norm", (x,), (weight(WIDTH),), eps=1e-6, unit_offset=False, fp32_weight=False)
        selection = biases if spec.scores != "sparse_mixer" else None
        router = (weight(e, WIDTH, name="mlp.gate.weight"), biases and weight(e), selection and weight(e))
        chosen, shares, _ = r.emit("route", (given,), router, spec=spec.to_json())
        up = 2 * INNER if gated else INNER
        prefix = f"{len(weights)}.experts."
        stacks: Mapping[str, tuple[int, ...]] = {
            "gate_up_proj": (e, up, WIDTH),
            "gate_up_proj_bias": (e, up),
            "down_proj": (e, WIDTH, INNER),
            "down_proj_bias": (e, WIDTH),
        }
        refs = []
        for name, shape in stacks.items():
            if name.endswith("bias") and not biased:
                refs.append(None)
                continue
            scale = 0.3 if name.endswith("bias") else shape[-1] ** -0.5
            weights[prefix + name] = torch.randn(shape, generator=generator) * scale
            refs.append(WeightRef(prefix + name, shape, "float32"))
        y = r.emit("experts", (given, chosen, shares), tuple(refs), kind=kind, gated=gated, **numbers)
        shared = r.emit("linear", (given,), (weight(WIDTH, WIDTH), None))
        shared = r.emit("gate", (r.emit("linear", (given,), (weight(1, WIDTH), None)), shared), kind="sigmoid")
        return r.emit("add", (x, r.emit("add", (y, shared))))

    x = r.emit("embed", (ids,), (weight(VOCABULARY, WIDTH),), scale=3.0, round_scale=False)
    x = mixture(x, ROUTERS[0], True, True, "gelu_tanh")
    x = mixture(x, ROUTERS[1], False, True, "silu")
    x = mixture(x, ROUTERS[2], True, True, "clamped_swiglu", alpha=1.3, limit=0.6)
    x = mixture(x, ROUTERS[3], True, True, "gelu")
    q, k, v = (
        r.emit("view", (r.emit("linear", (x,), (weight(32, WIDTH), None)),), tail=(1, 32), drop=1) for _ in range(3)
    )
    sizes = {"num_heads": 1, "num_kv_heads": 1, "key_width": 32, "value_width": 32}
    a = r.emit("attend", (q, k, v), layer=0, spec={**sizes, "scale": 0.2, "window": 0, "soft_cap": 0.0})
    a = r.emit("linear", (r.emit("view", (a,), tail=(32,), drop=2),), (weight(WIDTH, 32), None))
    hidden = mixture(r.emit("add", (x, a)), ROUTERS[4], True, False, "relu_squared")
    logits = r.emit("logits", (r.emit("select_rows", (hidden, rows)),), (weight(VOCABULARY, WIDTH),))
    return r.recording({"hidden": hidden, "logits": logits}, (LayerCache(1, 32, 32),)), weights


def changed(recording: Recording, name: str, **attrs: Any) -> Recording:
    """The recording with other attributes of every operation `name`."""
    ops = (
        Op(op.name, op.inputs, op.outputs, op.weights, op.attrs | attrs) if op.name == name else op
        for op in recording.ops
    )
    return Recording(
        recording.values, tuple(ops), recording.inputs, recording.outputs, recording.caches, recording.model
    )
