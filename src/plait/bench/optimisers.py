"""A step of each optimiser on the shapes of a model of 38M parameters, beside torch's and the public implementations.

Parameters and gradients are random numbers; nothing but `step()` is timed. The floor of AdamW, Lion, MARS and Sophia is
what memory allows: the bytes that must be read and written at the rate at which this machine reads. Muon's is its
products at the rate of torch's in the same precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from plait.bench.limits import read_rate, torch_product_rate
from plait.bench.report import OURS, make_row, start_report
from plait.bench.summary import alternate
from plait.errors import PlaitError
from plait.kernels import native
from plait.model.decoder import Decoder, from_config
from plait.training.optimizers import RoleOptimizer, build_optimizer, state_bytes
from plait.training.optimizers.muon import MATRICES, precision_on

# The reference size of the studies: 24,000 tokens, width 512, 8 layers with plain feed-forwards of 2,048, a tied head.
SHAPES: dict[str, Any] = {
    "model_type": "nemotron",
    "vocab_size": 24000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
# Arrays of the parameters' size that a step must read and write: parameter, gradient and state; all but the gradient
# are written, and of Sophia's the curvature is not.
PASSES = {"adamw": 7, "lion": 5, "mars": 9, "sophia": 6}
_STEPS = 3  # of a run, after one that warms up


def measure_optimisers(
    rounds: int = 5,
    threads: int | None = None,
    shapes: dict[str, Any] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The report: a row per optimiser with milliseconds per step of every side. advance: called after every run."""
    before, library = torch.get_num_threads(), native.native_library()
    used = threads or native.usable_cpus()
    ours_before = None if library is None else library.threads()
    try:
        torch.set_num_threads(used)
        if library is not None:
            library.set_threads(used)
        return _measure(rounds, used, shapes or SHAPES, advance)
    finally:
        torch.set_num_threads(before)
        if library is not None and ours_before is not None:
            library.set_threads(ours_before)


def count_runs(rounds: int) -> int:
    """How often `advance` is called: every side once per round, and once to warm up."""
    return (rounds + 1) * sum(1 + len(_installed(peers)) for peers in PEERS.values())


def _measure(rounds: int, threads: int, shapes: dict[str, Any], advance: Callable[[], None]) -> dict[str, Any]:
    packages = sorted({package for peers in PEERS.values() for package, _ in peers.values()})
    found = {name: metadata.version(name) for name in packages if _has(name)}
    numbers = sum(p.numel() for p in from_config(shapes).parameters())
    settings = {"threads": threads, "runs": rounds, "steps of a run": _STEPS, "parameters": f"{numbers:,}"}
    report = start_report("optimisers", None, found, settings)
    for name, peers in PEERS.items():
        report["rows"].append(_row(name, _installed(peers), rounds, threads, shapes, advance))
    absent = [name for name in packages if name not in found]
    report["notes"] += [f"{name} is not installed: pip install {name}" for name in absent]
    if native.native_library() is None:
        report["notes"].append(f"plait steps in torch: {native.reason()}")
    return report


def _row(
    name: str, peers: dict[str, Any], rounds: int, threads: int, shapes: dict[str, Any], advance: Callable[[], None]
) -> dict[str, Any]:
    optimizer = build_optimizer(name, _decoder(shapes))
    numbers = sum(d.parameter.numel() for d in optimizer.described)
    sides: dict[str, Callable[[], float]] = {OURS: partial(_milliseconds, [optimizer])}
    others = {peer: make(_decoder(shapes)) for peer, (_, make) in peers.items()}
    sides |= {peer: partial(_milliseconds, steppers) for peer, steppers in others.items()}
    found = alternate(sides, rounds, advance)
    held = {OURS: state_bytes(optimizer)}
    held |= {peer: sum(_state_bytes(o) for o in steppers) for peer, steppers in others.items()}
    details: dict[str, Any] = {
        "state bytes": held,
        "state, times the parameters": {side: round(value / (4 * numbers), 2) for side, value in held.items()},
    }
    if name == "muon":
        precision = precision_on("auto", torch.device("cpu"))
        details["products in"] = str(precision).removeprefix("torch.")
        layout = "BF16" if precision == torch.bfloat16 else "F32"
        seconds = _multiply_adds(optimizer) / torch_product_rate(layout, threads)
        limit = (f"its products at the rate of torch's in {details['products in']}", seconds * 1e3)
    else:
        seconds = PASSES[name] * 4 * numbers / read_rate(1 << 30, threads)
        limit = (f"memory bandwidth, {PASSES[name] * 4 * numbers / 1e9:.2f} GB", seconds * 1e3)
    return make_row(name, "ms", found, better="lower", limit=limit, details=details)


def _milliseconds(optimizers: list[torch.optim.Optimizer]) -> float:
    """Of one step, the mean of some."""
    for optimizer in optimizers:
        optimizer.step()
    start = time.perf_counter()
    for _ in range(_STEPS):
        for optimizer in optimizers:
            optimizer.step()
    return (time.perf_counter() - start) / _STEPS * 1e3


def _decoder(shapes: dict[str, Any]) -> Decoder:
    """Random parameters and gradients."""
    decoder = from_config(shapes)
    generator = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        parameter.grad = 0.01 * torch.randn(parameter.shape, generator=generator)
    return decoder


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _multiply_adds(optimizer: RoleOptimizer) -> float:
    """Of the products of one step of Muon as the iteration is written: per step of it X X^T, A A and B X."""
    total = 0.0
    for d in optimizer.described:
        if d.role in MATRICES:
            columns = d.parameter.shape[-1]
            rows = d.parameter.numel() // d.matrices // columns
            small, large = min(rows, columns), max(rows, columns)
            total += d.matrices * (2 * small * small * large + small**3)
    steps = next(group["ns_steps"] for group in optimizer.param_groups if group["rule"] == "muon")
    return total * steps


def _torch_adamw(decoder: Decoder, **how: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(decoder.parameters(), lr=1e-4, **how)]


def _lion(decoder: Decoder, foreach: bool) -> list[torch.optim.Optimizer]:
    module = import_module("lion_pytorch.foreach" if foreach else "lion_pytorch")
    return [module.Lion(decoder.parameters(), lr=1e-4, weight_decay=0.3)]


def _mars(decoder: Decoder) -> list[torch.optim.Optimizer]:
    return [import_module("pytorch_optimizer").MARS(decoder.parameters(), lr=1e-4)]


def _sophia(decoder: Decoder) -> list[torch.optim.Optimizer]:
    return [import_module("sophia_opt").SophiaG(decoder.parameters(), lr=1e-4)]


def _torch_muon(decoder: Decoder) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, and torch's fastest AdamW for the rest: the same work as ours."""
    inside = {id(p): p for name, p in decoder.named_parameters() if ".layers." in name and p.ndim == 2}
    rest = [p for p in decoder.parameters() if id(p) not in inside]
    return [torch.optim.Muon(list(inside.values()), lr=1e-3), torch.optim.AdamW(rest, lr=1e-4, fused=True)]


# Optimiser -> side -> (package, its optimisers over a decoder's parameters).
PEERS: dict[str, dict[str, tuple[str, Callable[[Decoder], list[torch.optim.Optimizer]]]]] = {
    "adamw": {
        "torch fused": ("torch", partial(_torch_adamw, fused=True)),
        "torch foreach": ("torch", partial(_torch_adamw, foreach=True)),
    },
    "lion": {
        "lion-pytorch": ("lion-pytorch", partial(_lion, foreach=False)),
        "lion-pytorch foreach": ("lion-pytorch", partial(_lion, foreach=True)),
    },
    "mars": {"pytorch_optimizer": ("pytorch_optimizer", _mars)},
    "sophia": {"sophia-opt": ("sophia-opt", _sophia)},
    "muon": {"torch": ("torch", _torch_muon)},
}


def _installed(peers: dict[str, Any]) -> dict[str, Any]:
    return {name: peer for name, peer in peers.items() if _has(peer[0])}


def _has(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        if package == "torch":
            raise PlaitError("torch is not installed: pip install torch") from None
        return False
    return True
