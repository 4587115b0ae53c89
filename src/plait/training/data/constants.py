"""Numbers that stand in batches and in token files alike."""

from __future__ import annotations

IGNORE = -100  # a target that is none
ROLE_SOURCE, ROLE_TARGET, ROLE_PADDING = 0, 1, -1
PAD, EOS, SEP = 0, 1, 2  # the special tokens of a tokenizer that is trained here
