"""The plots of a run: from its log and its evaluation to files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plait.studies import plots
from plait.studies.plots import Line
from plait.training.expert_counts import ExpertCounts

LOG = "log.jsonl"


def read_log(run: Path) -> list[dict[str, Any]]:
    """The records of a run's log; a line that is still being written is left out."""
    file = run / LOG
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in records if isinstance(record, dict)]


def losses_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Line]:
    """Training loss by step and validation loss, over the tokens seen."""
    names = {"train": "training", "valid": "validation"}
    found: dict[str, Line] = {}
    for record in records:
        if record.get("kind") in names and "loss" in record:
            x, y = found.setdefault(names[record["kind"]], Line([], []))
            x.append(record["tokens"])  # type: ignore[attr-defined]
            y.append(record["loss"])  # type: ignore[attr-defined]
    return found


def routing_of(records: Iterable[Mapping[str, Any]]) -> tuple[list[float], dict[int, Any], dict[int, Any]]:
    """Tokens seen, load by layer and entropy by layer, of the training records that have them."""
    tokens: list[float] = []
    load: dict[int, Any] = {}
    entropy: dict[int, Any] = {}
    for record in records:
        routing = record.get("routing") if record.get("kind") == "train" else None
        if not routing:
            continue
        tokens.append(record["tokens"])
        for name, figures in routing.items():
            if name.isdigit():
                load.setdefault(int(name), []).append(figures["load"])
                entropy.setdefault(int(name), []).append(figures["entropy"])
    return tokens, load, entropy


def plot_run(run: Path, figures: Mapping[str, Any], directory: Path) -> list[Path]:
    """Loss curves; of a mixture load and entropy over time, heatmaps and separation. figures: what evaluation found."""
    records = read_log(run)
    written = []
    losses = losses_of(records)
    if losses:
        written += plots.save(plots.loss_curves(losses), directory / "loss")
    tokens, load, entropy = routing_of(records)
    if tokens:
        written += plots.save(plots.load_and_entropy(tokens, load, entropy), directory / "load")
    experts = figures.get("experts")
    if experts:
        counts = ExpertCounts(tuple(experts["layers"]), experts["slots"])
        written += plots.save(plots.routing_heatmaps(counts.heatmaps(), list(counts.slots)), directory / "experts")
        if experts["separation"]:
            written += plots.save(
                plots.routing_separation(experts["separation"], counts.layers), directory / "separation"
            )
    return written
