"""What one forward of training is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plait.training.data.constants import IGNORE, ROLE_PADDING

if TYPE_CHECKING:
    from plait.training.data.examples import Example


@dataclass(frozen=True)
class Batch:
    """B rows of T positions, padded on the right.

    ids: int64 [B, T]. targets: int64 [B, T], what each position predicts, -100 where it predicts nothing.
    token_mask: bool [B, T], False at padding: it goes by length, never by id, so that padding may have the id of eos.
    segment_ids: int64 [B, T] or None; positions of different segments do not see each other. positions: int64 [B, T] or
    None (0 .. T - 1); they begin anew in each segment.
    roles: int8 [B, T] or None: 0 source side up to the separator, 1 target side, -1 padding.
    languages: int64 [B] or None: places in `Data.languages`.
    """

    ids: Tensor
    targets: Tensor
    token_mask: Tensor
    segment_ids: Tensor | None = None
    positions: Tensor | None = None
    roles: Tensor | None = None
    languages: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Positions that are no padding."""
        return int(self.token_mask.sum())

    @property
    def target_count(self) -> int:
        return int((self.targets != IGNORE).sum())

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.ids.numel()

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        return replace(self, **moved)

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start .. stop - 1, padding that all of them have left out."""
        length = int(self.token_mask[start:stop].sum(-1).max())
        cut = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                cut[field.name] = value[start:stop] if value.ndim == 1 else value[start:stop, :length]
        return replace(self, **cut)


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """The batch of some examples, in their order, as long as the longest. At least one, and none of them empty."""
    length = max(len(example.ids) for example in examples)
    shape = (len(examples), length)
    ids = np.full(shape, pad_id, np.int64)
    targets = np.full(shape, IGNORE, np.int64)
    mask = np.zeros(shape, np.bool_)
    first = examples[0]
    # Padding is a segment of its own; its position is 0, so that no table is read beyond its end.
    segments = None if first.segment_ids is None else np.full(shape, -1, np.int64)
    positions = None if first.positions is None else np.zeros(shape, np.int64)
    roles = None if first.roles is None else np.full(shape, ROLE_PADDING, np.int8)
    for row, example in enumerate(examples):
        count = len(example.ids)
        ids[row, :count] = example.ids
        targets[row, :count] = example.targets
        mask[row, :count] = True
        parts: Any = (
            (segments, example.segment_ids),
            (positions, example.positions),
            (roles, example.roles),
        )
        for whole, part in parts:
            if whole is not None:
                whole[row, :count] = part
    languages = None if first.language is None else np.array([example.language for example in examples], np.int64)
    arrays = (ids, targets, mask, segments, positions, roles, languages)
    return Batch(*(None if array is None else torch.from_numpy(array) for array in arrays))  # type: ignore[arg-type]


def nothing(like: Batch, pad_id: int) -> Batch:
    """One position of padding, with the fields that `like` has: it moves nothing, and keeps ranks in step."""
    cut = like.rows(0, 1)
    row = {f.name: v[:, :1] for f in fields(cut) if (v := getattr(cut, f.name)) is not None and v.ndim == 2}
    fills = {
        "ids": pad_id,
        "targets": IGNORE,
        "token_mask": False,
        "segment_ids": -1,
        "positions": 0,
        "roles": ROLE_PADDING,
    }
    return replace(cut, **{name: torch.full_like(value, fills[name]) for name, value in row.items()})
