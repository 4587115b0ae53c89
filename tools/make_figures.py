"""Draw the figures of docs/learn: `python tools/make_figures.py` (needs the `docs` extra).

Every curve is computed by plait's own code. The same versions give the same bytes, so a figure that no longer fits the
code shows as a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from pathlib import Path
from typing import Any

import numpy as np

TARGET = Path(__file__).parents[1] / "docs" / "learn"


def _frequencies(rope_type: str = "default", theta: float = 10_000.0, **scaling: Any) -> Any:
    from plait.model.config import RotarySpec
    from plait.model.rope import rotary_numbers

    return rotary_numbers(RotarySpec(rope_type, theta, 128, 128, 4096, scaling))[0].astype(float)


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}


def _wavelengths(axes: Any) -> None:
    pairs = np.arange(64)
    for label, f in (
        ("theta 10,000", _frequencies()),
        ("theta 500,000", _frequencies(theta=500_000.0)),
        ("theta 10,000, llama3 by 8", _frequencies("llama3", **_LLAMA3)),
    ):
        axes.semilogy(pairs, 2 * pi / f, label=label)
    axes.axhline(4096, color="grey", linewidth=0.8)
    axes.text(0, 4096 * 1.25, "a context of 4,096", color="grey")
    axes.set(xlabel="pair", ylabel="wavelength, tokens")


def _scalings(axes: Any) -> None:
    base, pairs = _frequencies(), np.arange(64)
    # The base that serves 8 times the context, which is what `dynamic` settles on there.
    grown = _frequencies(theta=10_000.0 * (8.0 * 8.0 - 7.0) ** (128 / 126))
    yarn = _frequencies("yarn", factor=8.0, original_max_position_embeddings=4096)
    for label, f in (
        ("linear", _frequencies("linear", factor=8.0)),
        ("dynamic, L = 8 M", grown),
        ("llama3", _frequencies("llama3", **_LLAMA3)),
        ("yarn", yarn),
    ):
        axes.plot(pairs, base / f, label=label)
    axes.set(xlabel="pair", ylabel="divisor of the frequency", yscale="log")


def _blocks(axes: Any) -> None:
    from plait.memory.layout import CacheGroup, group_blocks
    from plait.ops.spec import LayerCache

    contexts = np.unique(np.geomspace(1, 32_768, 400).astype(int))
    for window in (0, 4096, 1024, 128):
        group = CacheGroup((0,), LayerCache(8, 64, 64, window), 16)
        blocks = [group_blocks(group, int(tokens), 512) for tokens in contexts]
        axes.plot(contexts, blocks, label=f"window {window:,}" if window else "no window")
    axes.set(xlabel="tokens of the sequence", ylabel="blocks of 16 tokens", yscale="log")


def _routers(axes: Any) -> None:
    import torch

    from plait.ops.reference import route
    from plait.ops.spec import RouterSpec

    logits = [2.0, 1.6, 0.4, 0.1, -0.3, -1.0]
    rules = {
        "softmax": RouterSpec(6, 2),
        "softmax, renormalised": RouterSpec(6, 2, renormalise="always"),
        "softmax over the chosen": RouterSpec(6, 2, "topk_softmax"),
        "sigmoid": RouterSpec(6, 2, "sigmoid"),
        "sparse mixer, jitter 0.2": RouterSpec(6, 2, "sparse_mixer", jitter=0.2),
    }
    for row, (label, spec) in enumerate(rules.items()):
        _, weights, _ = route(torch.eye(1), torch.tensor(logits)[:, None], spec=spec)
        axes.barh(row - 0.2, float(weights[0, 0]), 0.35, color="C0")
        axes.barh(row + 0.2, float(weights[0, 1]), 0.35, color="C1")
        axes.text(-0.02, row, label, ha="right", va="center")
    axes.set(xlabel="weights of the experts with logits 2.0 and 1.6", yticks=[], ylim=(len(rules) - 0.4, -0.6))


def _latent(axes: Any) -> None:
    heads, nope, rope, v, r = 128, 128, 64, 128, 512
    queries = np.arange(1, 513)
    for context, colour in ((1024, "C0"), (16_384, "C1")):
        expand = 2 * context * r * heads * (nope + v)
        expanded = expand + 2 * queries * context * heads * (nope + rope + v)
        absorbed = 2 * queries * heads * r * (nope + v) + 2 * queries * context * heads * (2 * r + rope)
        axes.loglog(queries, expanded / 1e9, color=colour, label=f"expanded, {context:,} keys")
        axes.loglog(queries, absorbed / 1e9, color=colour, linestyle="--", label=f"absorbed, {context:,} keys")
    axes.set(xlabel="query tokens of the sequence", ylabel="GFLOP of one layer")


FIGURES: dict[str, Callable[[Any], None]] = {
    "rope-wavelengths.svg": _wavelengths,
    "rope-scalings.svg": _scalings,
    "windows-blocks.svg": _blocks,
    "routers-weights.svg": _routers,
    "latent-costs.svg": _latent,
}


def draw(target: Path) -> None:
    """Write every figure into a directory."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Text stays text, and names inside the file do not depend on chance or on the day.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plait", "font.family": "sans-serif"})
    for name, function in FIGURES.items():
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        function(axes)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(target / name, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


if __name__ == "__main__":
    draw(TARGET)
    print(f"{TARGET}: {len(FIGURES)} figures")
