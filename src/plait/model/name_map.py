"""Invertible maps between a file's tensor names and ours, as data. `plait.weights` applies them both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.model.config import ModelConfig

Rows = Sequence[NDArray[np.int64]]
RowsOf = Callable[[ModelConfig, int], Rows]


@dataclass(frozen=True)
class Rule:
    """One tensor of the file becomes one or more of ours.

    file, ours: names, `{i}` standing for the layer index. rows: for each of ours, which rows (axis 0) of the file's
    tensor it consists of, given (config, layer); together they use every row once, so the way back is exact, for
    quantised
    rows too. None: all rows. offset: added to the values on the way in (GGUF stores Gemma's norms as 1 + w: -1).
    """

    file: str
    ours: tuple[str, ...]
    rows: RowsOf | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class NameMap:
    """Rules of a file format and family; a name that no rule mentions keeps its name.

    skip: regular expressions of tensors that are recomputed or belong to another part of the checkpoint.
    prefixes: (file's, ours) replaced at the start of a name before anything else (multimodal directories); not used
    on export.
    """

    rules: tuple[Rule, ...] = ()
    skip: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()


ROTARY_BUFFERS = (r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",)


def paired(file: str, ours: str, kinds: Sequence[str] = ("weight",), rows: RowsOf | None = None) -> tuple[Rule, ...]:
    """The same rule for several parameters of one module, such as weight and bias."""
    return tuple(Rule(f"{file}.{kind}", (f"{ours}.{kind}",), rows) for kind in kinds)
