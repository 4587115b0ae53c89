"""Rules for the files of mixtures: one tensor per expert, or one for all experts, and where each lies in our stacks."""

from __future__ import annotations

import numpy as np

from plait.model.config import MixtureSpec, ModelConfig
from plait.model.name_map import Place, Rule


def _mixture(config: ModelConfig, layer: int) -> MixtureSpec:
    spec = config.layers[layer].feed_forward
    assert isinstance(spec, MixtureSpec)
    return spec


def _experts(spec: MixtureSpec, expert: int | None) -> tuple[int, int]:
    return (0, spec.router.num_experts) if expert is None else (expert, expert + 1)


def gate_place(config: ModelConfig, layer: int, expert: int | None) -> Place:
    """The first half of gate_up_proj's rows, or of its bias."""
    spec = _mixture(config, layer)
    return Place(_experts(spec, expert), (0, spec.width))


def up_place(config: ModelConfig, layer: int, expert: int | None) -> Place:
    """The second half."""
    spec = _mixture(config, layer)
    return Place(_experts(spec, expert), (spec.width, 2 * spec.width))


def interleaved_place(config: ModelConfig, layer: int, expert: int | None) -> Place:
    """All rows of gate_up_proj, or of its bias, from a file in which the gate's and up's take turns."""
    spec = _mixture(config, layer)
    turns = np.arange(2 * spec.width).reshape(spec.width, 2)
    return Place(_experts(spec, expert), (0, 2 * spec.width), turns.T.ravel())


def down_place(config: ModelConfig, layer: int, expert: int | None) -> Place:
    """All rows of down_proj."""
    return Place(_experts(_mixture(config, layer), expert), (0, config.hidden_size))


def expert_rules(
    file: str, parts: tuple[str, str, str] = ("gate", "up", "down"), read_only: bool = False
) -> tuple[Rule, ...]:
    """Rules for a file whose experts have three matrices each, called `file` with `{part}` standing for these names.

    `{i}` stands for the layer and `{e}` for the expert; without `{e}` the file's tensors are [E, rows, columns].
    read_only: such files are never written.
    """
    stacks = "model.layers.{i}.mlp.experts"
    targets = (("gate_up_proj", gate_place), ("gate_up_proj", up_place), ("down_proj", down_place))
    return tuple(
        Rule(file.replace("{part}", part), (f"{stacks}.{stack}",), place=place, read_only=read_only)
        for part, (stack, place) in zip(parts, targets, strict=True)
    )
