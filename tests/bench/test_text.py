"""Prompts are different pieces of real text of exactly the length asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.bench.text import PROSE, load_text_ids, make_prompts
from plait.errors import UsageError
from tests.tiny import tiny_model_dir


def test_prompts_have_their_length_and_no_two_begin_alike() -> None:
    ids = list(range(1000))
    prompts = make_prompts(ids, [7777], 32, 128)  # pieces overlap: 32 * 127 > 1000
    assert [len(p) for p in prompts] == [128] * 32
    assert all(p[0] == 7777 for p in prompts)
    assert len({p[1] for p in prompts}) == 32
    assert all(p[1:] == list(range(p[1], p[1] + 127)) for p in prompts)


def test_prompts_do_not_overlap_where_the_text_is_long_enough() -> None:
    first, second = make_prompts(list(range(100)), [], 2, 50)
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("ids", "prefix", "count", "length"), [(10, 0, 1, 11), (10, 0, 5, 8), (10, 1, 1, 1), (0, 0, 1, 1)]
)
def test_a_text_that_is_too_short_is_said(ids: int, prefix: int, count: int, length: int) -> None:
    with pytest.raises(UsageError):
        make_prompts(list(range(ids)), [1] * prefix, count, length)


def test_the_prose_is_long_enough_for_32_requests_of_bytes(tmp_path: Path) -> None:
    ids, prefix = load_text_ids(tiny_model_dir(tmp_path))
    assert bytes(ids) == PROSE.read_bytes()  # the tiny tokenizer's ids are bytes
    assert prefix == []


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), (b"\xff\xfe", "not UTF-8")])
def test_a_text_that_cannot_be_read(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        load_text_ids(tiny_model_dir(tmp_path), file)
