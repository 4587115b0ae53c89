"""A figure holds the numbers that it was given."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from plait.errors import UsageError
from plait.studies import plots
from plait.studies.plots import Line

pytest.importorskip("matplotlib")


def drawn(axes) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_loss_curves_draw_each_run_over_its_tokens() -> None:
    figure = plots.loss_curves({"dense": Line([100, 200], [5.0, 4.0]), "top-1": Line([100, 300], [5.5, None])})
    found = drawn(figure.axes[0])
    assert found["dense"] == ([100, 200], [5.0, 4.0])
    assert found["top-1"][0] == [100, 300] and found["top-1"][1][0] == 5.5 and np.isnan(found["top-1"][1][1])
    assert figure.axes[0].get_xlabel() == "tokens seen"
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["dense", "top-1"]


def test_a_heatmap_per_layer_with_its_rows_and_cells() -> None:
    shares = {layer: [[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]] for layer in (0, 2, 3, 5, 6)}
    shares[5] = [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    figure = plots.routing_heatmaps(shares, ["vi source", "vi target"])
    grids = [axes for axes in figure.axes if axes.get_images()]
    assert [axes.get_title() for axes in grids] == [f"layer {layer}" for layer in shares]
    for axes, grid in zip(grids, shares.values(), strict=True):
        assert axes.get_images()[0].get_array().tolist() == grid
        assert axes.get_images()[0].get_clim() == (0.0, 1.0)  # one scale for all
        written = [text.get_text() for text in axes.texts]
        assert written == [f"{value:.2f}" for line in grid for value in line]
    assert [tick.get_text() for tick in grids[0].get_yticklabels()] == ["vi source", "vi target"]
    assert [tick.get_text() for tick in grids[1].get_yticklabels()] == ["", ""]


def test_separation_is_drawn_per_layer_from_zero() -> None:
    figure = plots.routing_separation({"vi source / ja source": [0.1, 0.19]}, [0, 1])
    axes = figure.axes[0]
    assert drawn(axes)["vi source / ja source"] == ([0, 1], [0.1, 0.19])
    assert axes.get_ylim()[0] == 0 and list(axes.get_xticks()) == [0, 1]


def test_load_is_drawn_by_its_largest_expert_and_entropy_as_it_is() -> None:
    load = {0: [[0.5, 0.5], [0.9, 0.1]], 1: [[0.4, 0.6], [0.3, 0.7]]}
    figure = plots.load_and_entropy([10, 20], load, {0: [1.0, 0.47], 1: [0.97, 0.88]})
    upper, lower = (drawn(axes) for axes in figure.axes)
    assert upper == {"layer 0": ([10, 20], [0.5, 0.9]), "layer 1": ([10, 20], [0.6, 0.7])}
    assert lower == {"layer 0": ([10, 20], [1.0, 0.47]), "layer 1": ([10, 20], [0.97, 0.88])}


def test_png_and_svg_are_written_and_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    def figure():
        return plots.loss_curves({"train": Line([1, 2, 3], [3.0, 2.5, 2.25])})

    first = plots.save(figure(), tmp_path / "a.b" / "loss")
    second = plots.save(figure(), tmp_path / "again")
    assert [path.name for path in first] == ["loss.png", "loss.svg"]
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True)] == [True, True]
    assert first[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    texts = [e.text for e in ElementTree.parse(first[1]).iter() if e.tag.endswith("text")]
    assert "loss, nats per token" in texts


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"plait\[train\]"):
        plots.loss_curves({})
