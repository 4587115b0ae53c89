"""Token ids on disk: wide enough for the vocabulary, offsets beyond 4 GiB, and nothing read that does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import cachefile
from plait.errors import DataError
from plait.training.data import tokens
from plait.training.data.examples import TokenStore, Windows
from plait.training.data.task import Encoded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cachefile, "_said", set())
    return tmp_path / "cache"


def store(vocab_size: int, *sequences: Encoded) -> TokenStore:
    builder = tokens.StoreBuilder(vocab_size)
    for sequence in sequences:
        builder.add(sequence)
    return builder.build()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(300, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (66_000, "<u4"), (151_700, "<u4")]
)
def test_the_largest_id_survives(cache: Path, vocab_size: int, dtype: str) -> None:
    found = store(vocab_size, Encoded([vocab_size - 1, 0, vocab_size - 2]))
    assert found.tokens.dtype == np.dtype(dtype)
    tokens.write("a.plait", {"k": 1}, {"0.train": found}, {"note": 7})
    read = tokens.read("a.plait", {"k": 1}, vocab_size)
    assert read is not None and read[1]["note"] == 7
    assert read[0]["0.train"].sequence(0)[0].tolist() == [vocab_size - 1, 0, vocab_size - 2]


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="gives the id 70000, its vocabulary has 65536 entries"):
        store(65_536, Encoded([5, 70_000]))


@given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=9), max_size=9))
def test_sequences_come_back(sequences: list[list[tuple[int, bool]]]) -> None:
    found = store(100, *(Encoded([t for t, _ in s], [int(m) for _, m in s], len(s)) for s in sequences))
    assert len(found) == len(sequences)
    for index, sequence in enumerate(sequences):
        ids, learnt = found.sequence(index)
        assert learnt is not None and found.languages is not None
        assert list(zip(ids.tolist(), learnt.astype(bool).tolist(), strict=True)) == sequence
        assert found.languages[index] == len(sequence)


def test_offsets_reach_beyond_4_gib(tmp_path: Path) -> None:
    # 2^32 + 8 tokens of two bytes: a file with a hole, of which only the end has blocks on the disk.
    count, path = 2**32 + 8, tmp_path / "tokens"
    with path.open("wb") as file:
        file.truncate(2 * count)
        file.seek(2 * (count - 4))
        file.write(np.array([11, 12, 13, 14], "<u2").tobytes())
    found = TokenStore(np.memmap(path, "<u2", "r"), np.array([0, count - 4, count], np.int64))
    assert found.sequence(1)[0].tolist() == [11, 12, 13, 14]
    # 2^32 + 7 positions in windows of 2^20: 4096 whole ones, and one of 7 at the end.
    windows = Windows(found, 2**20, apart=True)
    last = windows[len(windows) - 1]
    assert (len(windows), windows.lengths[-1]) == (4097, 7)
    assert last.ids.tolist() == [0, 0, 0, 0, 11, 12, 13]
    assert last.targets.tolist() == [0, 0, 0, -100, 12, 13, 14]


def test_a_header_that_does_not_fit_is_said_and_not_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens.write("a.plait", {}, {"x": store(300, Encoded([1, 2]))}, {})
    assert tokens.read("a.plait", {}, 300) is not None
    assert tokens.read("a.plait", {}, 70_000) is None
    assert "x.tokens is <u2, a vocabulary of 70000 takes <u4" in caplog.text
    wrong = TokenStore(np.array([1, 2], "<u2"), np.array([0, 3], np.int64))
    tokens.write("b.plait", {}, {"x": wrong}, {})
    assert tokens.read("b.plait", {}, 300) is None
    assert "x ends elsewhere than its offsets say" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_entry_is_said_and_not_used(cache: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    tokens.write("a.plait", {}, {"x": store(300, Encoded(list(range(256))))}, {})
    path = cache / "a.plait"
    data = bytearray(path.read_bytes())
    data[4096 + 100] ^= 1
    path.write_bytes({"cut": data[:-9], "flipped": data, "emptied": b""}[damage])
    assert tokens.read("a.plait", {}, 300) is None
    assert "a.plait is ignored and written anew" in caplog.text
