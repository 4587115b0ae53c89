"""Invertible maps between a file's tensor names and ours, as data. `plait.weights` applies them both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.model.config import AttentionSpec, ModelConfig

Rows = Sequence[NDArray[np.int64]]
RowsOf = Callable[[ModelConfig, int], Rows]


@dataclass(frozen=True)
class Place:
    """Where in a stack [E, R, ...] a tensor of the file belongs: experts first .. last - 1, rows first .. last - 1 of
    each.

    order: for each of these rows, which row of its expert it is in the file; None: they stand there as they do here.
    """

    experts: tuple[int, int]
    rows: tuple[int, int]
    order: NDArray[np.int64] | None = field(default=None, compare=False)

    def of(self, stack: Any) -> Any:
        """The place itself, a view of the stack (an array or a tensor): [experts, rows, ...]."""
        return stack[self.experts[0] : self.experts[1], self.rows[0] : self.rows[1]]

    def from_file(self, tensor: Any) -> Any:
        """The file's [experts, rows, ...] with the rows in our order."""
        return tensor if self.order is None else tensor[:, self.order]

    def to_file(self, part: Any) -> Any:
        """The way back."""
        return part if self.order is None else part[:, np.argsort(self.order)]


# (config, layer, expert) -> the place; the expert is None where the file has one tensor for all of them.
PlaceOf = Callable[[ModelConfig, int, int | None], Place]


@dataclass(frozen=True)
class Rule:
    """One tensor of the file becomes one or more of ours, or a part of one (`place`).

    file, ours: names, `{i}` standing for the layer index and `{e}`, in `file`, for the expert's. rows: for each of
    ours, which rows (axis 0) of the file's tensor it consists of, given (config, layer); together they use every row
    once, so the way back is exact, for quantised rows too. None: all rows. offset: added to the values on the way in
    (GGUF stores Gemma's norms as 1 + w: -1). place: the part of a stack of experts that the file's tensor fills; such a
    rule concerns layers that are mixtures and has a single name in `ours`. one_row: the file has our vector as a matrix
    of one row. read_only: never written. when: of which
    models of the family the rule speaks; None: all.
    """

    file: str
    ours: tuple[str, ...]
    rows: RowsOf | None = None
    offset: float = 0.0
    place: PlaceOf | None = None
    one_row: bool = False
    read_only: bool = False
    when: Callable[[ModelConfig], bool] | None = None


@dataclass(frozen=True)
class NameMap:
    """Rules of a file format and family; a name that no rule mentions keeps its name.

    skip: regular expressions of tensors that are recomputed or belong to another part of the checkpoint; `{n}` stands
    for the indices of the layers after the last that predict further tokens (`ModelConfig.next_token_layers`).
    prefixes: (file's, ours) replaced at the start of a name before anything else (multimodal directories); not used
    on export. transposed: regular expressions of the file's matrices, or stacks of them, that are stored as [in, out]
    and not [out, in]; rules see them turned.
    """

    rules: tuple[Rule, ...] = ()
    skip: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    transposed: tuple[str, ...] = ()


ROTARY_BUFFERS = (r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",)


def paired(file: str, ours: str, kinds: Sequence[str] = ("weight",), rows: RowsOf | None = None) -> tuple[Rule, ...]:
    """The same rule for several parameters of one module, such as weight and bias."""
    return tuple(Rule(f"{file}.{kind}", (f"{ours}.{kind}",), rows) for kind in kinds)


def joined_q_k_v(
    file: str, attention: str, rows: RowsOf, kinds: Sequence[str] = ("weight", "bias")
) -> tuple[Rule, ...]:
    """Rules for q, k and v in one tensor. file: its module; attention: the module of ours that has the three."""
    return tuple(Rule(f"{file}.{kind}", tuple(f"{attention}.{p}_proj.{kind}" for p in "qkv"), rows) for kind in kinds)


def in_turn(*sizes: int) -> Rows:
    """Rows of parts of these sizes that stand one after the other."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def q_k_v_rows(config: ModelConfig, layer: int) -> Rows:
    """Rows of q, k and v in a matrix that holds them one after the other."""
    a = config.layers[layer].attention
    assert isinstance(a, AttentionSpec)
    return in_turn(a.num_heads * a.key_width, a.num_kv_heads * a.key_width, a.num_kv_heads * a.value_width)


def gate_up_rows(config: ModelConfig, layer: int) -> Rows:
    """Rows of gate and up in a matrix that holds them one after the other."""
    width = config.layers[layer].feed_forward.width
    return in_turn(width, width)
