"""The sides of the split, and that no text and no source is on two of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import DataError, UsageError
from plait.training.data.chat import CHAT
from plait.training.data.config import DataConfig, JoinConfig, SourceConfig, SplitConfig
from plait.training.data.files import Row, read_rows
from plait.training.data.items import Item, items_of
from plait.training.data.language import LANGUAGE
from plait.training.data.splits import drop_leaks, normalised, side_of
from plait.training.data.translation import TRANSLATION


def item(text: str, side: str, source_id: str | None = None) -> Item:
    return Item("a.jsonl", 1, text, (text,), source_id, side)


def items(
    values: list[dict[str, Any]], task: str = "language", splits: SplitConfig | None = None, **source: Any
) -> list[Item]:
    config = DataConfig(task=task, splits=splits or SplitConfig(), sources=(SourceConfig(path="a", **source),))  # type: ignore[arg-type]
    one, kind = config.sources[0], {"language": LANGUAGE, "translation": TRANSLATION}[task]
    rows = [Row("a", number, row) for number, row in enumerate(values, 1)]
    return list(items_of(config, one, rows, kind.read(one), kind.columns(one), Counter()))


@pytest.mark.parametrize("source_id", ["a", "bible/01-001", "tiếng Việt", ""])
def test_the_side_is_that_of_the_hash(source_id: str) -> None:
    share = int(hashlib.blake2b(source_id.encode(), digest_size=8).hexdigest(), 16) / 16**16
    for valid, test in ((0.05, 0.05), (0.5, 0.3), (0.0, 0.0), (0.1, 0.8)):
        expected = "test" if share < test else "valid" if share < test + valid else "train"
        assert side_of(source_id, SplitConfig(valid, test)) == expected


def test_shares_come_out() -> None:
    # 20,000 ids at 5 %: 1,000 expected, 6 deviations, sqrt(20000 * 0.05 * 0.95), are 185.
    counts = Counter(side_of(f"doc/{number}", SplitConfig()) for number in range(20_000))
    assert abs(counts["valid"] - 1000) < 185 and abs(counts["test"] - 1000) < 185


def test_a_split_column_wins() -> None:
    rows = [{"text": f"t{n}", "split": name} for n, name in enumerate(("Validation", "test", "train", "dev", "", None))]
    sides = [item.side for item in items(rows, splits=SplitConfig(0.0, 0.999))]
    assert sides == ["valid", "test", "train", "valid", "test", "test"]
    assert items(rows[1:2], splits=SplitConfig(0.0, 0.0), split_column="")[0].side == "train"
    assert items(rows[1:2], split="valid")[0].side == "valid"
    with pytest.raises(DataError, match="a:1: split is 'held out', not train, valid or test"):
        items([{"text": "a", "split": "held out"}])


def test_what_comes_from_one_source_is_on_one_side() -> None:
    rows = [{"id": f"{n}", "source": f"s{n // 10}", "text": f"text {n}"} for n in range(400)]
    sides: dict[str | None, set[str]] = {}
    for found in items(rows, splits=SplitConfig(0.3, 0.3)):
        sides.setdefault(found.source_id, set()).add(found.side)
    assert len(sides) == 40 and all(len(own) == 1 for own in sides.values())
    assert {side for own in sides.values() for side in own} == {"train", "valid", "test"}


def test_a_text_without_a_source_id_is_its_own() -> None:
    pairs = [{"en": "Open the file", "vi": "Mở tệp"}, {"ja": "ファイルを開く", "en": "open  the FILE"}]
    for splits in (SplitConfig(0.5, 0.1), SplitConfig(0.1, 0.5)):
        one = items(pairs[:1], "translation", splits, source="en", target="vi")[0]
        two = items(pairs[1:], "translation", splits, source="ja", target="en")[0]
        assert one.side == two.side == side_of("open the file", splits)


def test_a_column_of_text_is_no_source_id() -> None:
    pair = {"source": "Hello", "target": "Xin chào", "id": "7"}
    (found,) = items([pair], "translation", SplitConfig(0.5, 0.1), languages=("en", "vi"))
    assert (found.source_id, found.side) == (None, side_of("7", SplitConfig(0.5, 0.1)))


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("b\u1ec7nh", "be\u0323\u0302nh", True),  # NFC and NFD
        (" A  b\n", "a B", True),
        ("STRASSE", "straße", True),
        ("hòa", "hoà", False),  # where the tone mark stands is no matter of normal forms
        ("a b", "ab", False),
    ],
)
def test_which_texts_are_the_same(one: str, two: str, same: bool) -> None:
    assert (normalised(one) == normalised(two)) is same
    leaking = [item(one, "train"), item(two, "test")]
    if same:
        with pytest.raises(DataError, match=r"stands in train \(a\.jsonl:1\) and in test \(a\.jsonl:1\)"):
            drop_leaks(leaking, "error")
    else:
        assert drop_leaks(leaking, "error") == leaking


def test_a_leak_is_named() -> None:
    found = [item("one", "train"), item("two", "train"), item("Two", "valid"), item("TWO ", "test"), item("3", "test")]
    with pytest.raises(DataError, match=r"the text 'two' stands in train .* in test .*, and 1 more.*on_leak=drop"):
        drop_leaks(found, "error")
    assert drop_leaks(found, "drop") == [found[0], *found[3:]]


def test_a_source_on_two_sides_is_a_leak_too() -> None:
    found = [item("one", "train", "s1"), item("two", "valid", "s1"), item("three", "test", "s2")]
    with pytest.raises(DataError, match="the source 's1' stands in train"):
        drop_leaks(found, "error")
    assert drop_leaks(found, "drop") == found[1:]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["train", "valid", "test"])), max_size=20))
def test_after_dropping_no_text_is_on_two_sides(texts: list[tuple[str, str]]) -> None:
    found = [item(*text) for text in texts]
    kept = drop_leaks(found, "drop")
    sides = {text: {k.side for k in kept if k.content == text} for text in "abcde"}
    assert all(len(own) <= 1 for own in sides.values())
    assert {k.content for k in kept} == {text for text, _ in texts}
    assert drop_leaks(kept, "error") == kept


def test_rows_are_chosen_by_column_words_and_number() -> None:
    rows = [
        {"text": "one two three", "kind": "doc", "flags": ""},
        {"text": "one", "kind": "doc", "flags": ""},
        {"text": "one two", "kind": "ui", "flags": "f"},
        {"text": "one two three four", "kind": "desc", "flags": "fn"},
        {"text": "a b c", "kind": "doc", "flags": None},
    ]

    def chosen(**source: Any) -> list[str]:
        return [found.content for found in items(rows, **source)]

    assert chosen(where={"kind": ["doc", "desc"]}) == ["one two three", "one", "one two three four", "a b c"]
    assert chosen(where={"kind": "d*"}, unless={"flags": "*f*"}) == ["one two three", "one", "a b c"]
    assert chosen(min_words=2, max_words=3) == ["one two three", "one two", "a b c"]
    assert chosen(where={"kind": "doc"}, max_rows=2) == ["one two three", "one"]
    with pytest.raises(DataError, match="a:1 has no column 'sort', which the source is filtered by"):
        chosen(where={"sort": "doc"})


def test_a_table_adds_columns(tmp_path: Path) -> None:
    (tmp_path / "licences.tsv").write_text("package\tclass\nblender\tGPL\nchromium\tpermissive\n")
    rows = [{"text": "one", "package": "blender"}, {"text": "two", "package": "chromium"}]
    join = JoinConfig(str(tmp_path / "licences.tsv"), "package")
    assert [found.content for found in items(rows, join=join, where={"class": "permissive"})] == ["two"]
    with pytest.raises(DataError, match=r"a:1: package is 'vlc', which .*licences\.tsv lacks"):
        items([{"text": "x", "package": "vlc"}], join=join)
    with pytest.raises(UsageError, match="there is no file"):
        items(rows, join=JoinConfig(str(tmp_path / "none.tsv"), "package"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, "a:1 has no column 'text', only 'body'"),
        ({"text": 3}, "a:1: text must be text, not int"),
        ({"text": "\ud800"}, r"a:1: text holds a lone surrogate \(character 0\)"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        items([row])


def test_a_blank_side_takes_its_pair_along() -> None:
    tally: Counter[str] = Counter()
    config = DataConfig(task="translation", sources=(SourceConfig(path="a", source="en", target="vi"),))
    one = config.sources[0]
    rows = [
        Row("a", n, dict(zip(("en", "vi"), pair, strict=True)))
        for n, pair in enumerate([("a", "x"), ("", "y"), ("c", " ")])
    ]
    found = list(items_of(config, one, rows, TRANSLATION.read(one), TRANSLATION.columns(one), tally))
    assert [f.texts for f in found] == [("a", "x")] and tally["blank"] == 2


def test_files_of_one_name_in_two_sources_are_no_leak(tmp_path: Path) -> None:
    found = []
    for side in ("train", "test"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "0.txt").write_text(f"a text of {side}")
        source = SourceConfig(path=str(tmp_path / side), split=side)
        config = DataConfig(sources=(source,))
        rows = read_rows(source)
        found += items_of(config, source, rows, LANGUAGE.read(source), LANGUAGE.columns(source), Counter())
    assert [one.side for one in drop_leaks(found, "error")] == ["train", "test"]


def test_the_collection_of_a_chat_is_no_source_id() -> None:
    chats = [
        {"source": "forum", "id": f"{n}", "messages": [{"role": "user", "content": f"question {n}"}]} for n in range(40)
    ]
    source = SourceConfig(path="a")
    config = DataConfig(task="chat", sources=(source,), splits=SplitConfig(0.3, 0.3))
    rows = [Row("a", number, row) for number, row in enumerate(chats, 1)]
    found = list(items_of(config, source, rows, CHAT.read(source), CHAT.columns(source), Counter()))
    assert [one.side for one in found] == [side_of(f"{n}", config.splits) for n in range(40)]
    assert {one.source_id for one in found} == {None}
