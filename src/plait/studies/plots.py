"""Plots of runs and studies: from numbers to a figure, from a figure to PNG and SVG. Nothing here reads or computes.

A function takes what it draws and gives a matplotlib `Figure` that holds exactly that; `save` writes it. matplotlib
comes with the extra `train`, and is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plait.errors import UsageError

# Text stays text, and names inside a file do not depend on chance.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "plait", "font.family": "sans-serif"}
_DPI = 150
# Beyond so many cells of a heatmap their figures would not be readable.
_WRITTEN_CELLS = 16


class Line(NamedTuple):
    """A curve: x and y of equal length; a y of None is a gap."""

    x: Sequence[float]
    y: Sequence[float | None]


def lines(curves: Mapping[str, Line], x_label: str, y_label: str, *, log_y: bool = False, marks: bool = False) -> Any:
    """A curve per name, in one picture."""
    figure = _figure(6.4, 3.8)
    axes = figure.subplots()
    for name, line in curves.items():
        y = [float("nan") if value is None else value for value in line.y]
        axes.plot(line.x, y, label=name, marker="o" if marks else None, markersize=4)
    axes.set(xlabel=x_label, ylabel=y_label, yscale="log" if log_y else "linear")
    _finish(axes, legend=len(curves) > 1)
    return figure


def loss_curves(curves: Mapping[str, Line]) -> Any:
    """Loss in nats per token over the tokens seen, a curve per run or split."""
    return lines(curves, "tokens seen", "loss, nats per token")


def routing_heatmaps(
    shares: Mapping[int, Sequence[Sequence[float]]], rows: Sequence[str], title: str = "share of the routing slots"
) -> Any:
    """Per layer a grid, rows (such as `vi source`) by experts, of shares that add up to 1 in each row."""
    columns = min(len(shares), 4)
    height = -(-len(shares) // columns)
    experts = max((len(line) for grid in shares.values() for line in grid), default=1)
    figure = _figure(1.4 + columns * max(2.0, 0.45 * experts), 0.8 + height * (0.9 + 0.32 * len(rows)))
    every = figure.subplots(height, columns, squeeze=False)
    highest = max((value for grid in shares.values() for line in grid for value in line), default=1.0)
    image = None
    for place, (layer, grid) in enumerate(shares.items()):
        axes = every[place // columns][place % columns]
        image = axes.imshow(grid, vmin=0.0, vmax=highest, cmap="viridis", aspect="auto")
        axes.set(title=f"layer {layer}", xticks=range(len(grid[0])), yticks=range(len(rows)))
        axes.set_yticklabels(rows if place % columns == 0 else [])
        if experts <= _WRITTEN_CELLS:
            for y, line in enumerate(grid):
                for x, value in enumerate(line):
                    colour = "white" if value < 0.6 * highest else "black"
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    for place in range(len(shares), height * columns):
        every[place // columns][place % columns].set_axis_off()
    if image is not None:
        figure.colorbar(image, ax=every.ravel().tolist(), label=title)
    return figure


def routing_separation(distances: Mapping[str, Sequence[float]], layers: Sequence[int]) -> Any:
    """Total variation distance (0: alike, 1: no expert in common) per layer, a curve per pair of rows."""
    figure = lines(
        {name: Line(layers, values) for name, values in distances.items()},
        "layer",
        "total variation distance",
        marks=True,
    )
    figure.axes[0].set(ylim=(0, None), xticks=list(layers))
    return figure


def load_and_entropy(
    tokens: Sequence[float], load: Mapping[int, Sequence[Sequence[float]]], entropy: Mapping[int, Sequence[float]]
) -> Any:
    """Over the tokens seen: per layer the largest expert's share of the slots, and the normalised entropy of the load.

    load: layer -> a list of shares for each record; entropy: layer -> a value for each record.
    """
    figure = _figure(6.4, 5.6)
    upper, lower = figure.subplots(2, sharex=True)
    for layer, shares in load.items():
        upper.plot(tokens, [max(each) for each in shares], label=f"layer {layer}")
    for layer, values in entropy.items():
        lower.plot(tokens, values, label=f"layer {layer}")
    upper.set(ylabel="largest expert's share", ylim=(0, 1))
    lower.set(xlabel="tokens seen", ylabel="entropy of the load / ln E", ylim=(0, 1.02))
    for axes in (upper, lower):
        _finish(axes, legend=axes is upper and len(load) > 1)
    return figure


def save(figure: Any, path: Path) -> list[Path]:
    """Write `path`.png and `path`.svg; the same figure gives the same bytes."""
    matplotlib = _matplotlib()
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(_STYLE):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
            file = path.with_name(path.name + suffix)
            figure.savefig(file, metadata=metadata, dpi=_DPI)
            written.append(file)
    return written


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError('plots need matplotlib: pip install "plait[train]"') from error
    return matplotlib


def _figure(width: float, height: float) -> Any:
    """A figure of its own: no window, no list of figures that somebody would have to close."""
    _matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _finish(axes: Any, legend: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=8)
