"""From files to batches: the three tasks, the cache, and what is said about it."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait import cachefile
from plait.errors import ConfigError, DataError, TokenizerError
from plait.text.tokenizer import Tokenizer, load_tokenizer
from plait.training.data import build
from plait.training.data.batches import Batches
from plait.training.data.build import Data, build_data
from plait.training.data.config import DataConfig, SourceConfig, SplitConfig, TokenizerConfig
from plait.training.data.items import Item
from plait.training.data.splits import side_of

NOUNS = ["kettle", "window", "ladder", "river", "button", "garden", "letter", "engine", "basket", "candle"]
VERBS = ["sings", "waits", "falls", "turns", "opens", "burns", "moves", "rests"]
OTHERS = "ấm cửa thang sông nút vườn thư máy giỏ nến hát đợi ngã quay mở cháy đi nghỉ"
VIETNAMESE = dict(zip(NOUNS + VERBS, OTHERS.split(), strict=True))
SENTENCES = [(f"The {noun} {verb} {n}.", noun, verb, n) for n in range(3) for noun in NOUNS for verb in VERBS]
SMALL = TokenizerConfig(vocab_size=320)
HALF = SplitConfig(valid=0.2, test=0.2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cachefile, "_said", set())
    return tmp_path / "cache"


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(path: Path) -> str:
    rows = [{"en": en, "vi": f"{VIETNAMESE[noun]} {VIETNAMESE[verb]} {n}."} for en, noun, verb, n in SENTENCES]
    return jsonl(path, rows)


def documents(path: Path) -> str:
    return jsonl(path, [{"source": f"s{i // 4}", "text": en} for i, (en, *_) in enumerate(SENTENCES)])


def language(path: str, **more: Any) -> DataConfig:
    return DataConfig(sources=(SourceConfig(path=path),), splits=HALF, tokenizer=SMALL, context=16, **more)


def translation(path: str, **more: Any) -> DataConfig:
    source = SourceConfig(path=path, source="en", target="vi")
    return DataConfig(task="translation", sources=(source,), splits=HALF, tokenizer=SMALL, context=64, **more)


def texts(data: Data, side: str) -> list[str]:
    store = data.stores[side][0]
    return [data.tokenizer.decode(store.sequence(index)[0].tolist()) for index in range(len(store))]


def test_documents(tmp_path: Path) -> None:
    data = build_data(language(documents(tmp_path / "a.jsonl")))
    sides = {en: side_of(f"s{i // 4}", HALF) for i, (en, *_) in enumerate(SENTENCES)}
    for side in ("train", "valid", "test"):
        assert texts(data, side) == [en for en, own in sides.items() if own == side]
        stream = data.stores[side][0].tokens
        windows = getattr(data, side)
        assert windows[1].ids.tolist() == stream[16:32].tolist()
        assert windows[1].targets.tolist() == stream[17:33].tolist()
        assert (stream == 1).sum() == len(texts(data, side))
    assert data.report.sources[0].text_bytes["valid"] == sum(len(t) for t in texts(data, "valid"))
    (line,) = data.report.lines()
    assert f"240 rows; train {len(texts(data, 'train'))}" in line


def test_translation(tmp_path: Path) -> None:
    data = build_data(translation(pairs(tmp_path / "a.jsonl")))
    assert data.languages == ("vi",) and data.tokenizer.special_token_id("<vi>") == 3
    encode = data.tokenizer.encode_plain
    examples = [data.train[index] for index in range(len(data.train))]
    expected = []
    for en, noun, verb, n in SENTENCES:
        if side_of(en.casefold(), HALF) == "train":
            target = encode(f"{VIETNAMESE[noun]} {VIETNAMESE[verb]} {n}.")
            expected.append(([3, *encode(en), 2, *target], [-100] * (len(encode(en)) + 1) + [*target, 1]))
    assert [(example.ids.tolist(), example.targets.tolist()) for example in examples] == expected
    for example in examples:
        separator = example.ids.tolist().index(2)
        assert example.roles is not None
        assert example.roles.tolist() == [0] * (separator + 1) + [1] * (len(example.ids) - separator - 1)


def test_both_directions_and_several_languages(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl")
    japanese = jsonl(
        tmp_path / "b.jsonl", [{"en": en, "ja": f"{noun}が{verb}。{n}"} for en, noun, verb, n in SENTENCES]
    )
    config = translation(path, both_directions=True)
    config = replace(config, sources=(*config.sources, SourceConfig(path=japanese, source="en", target="ja")))
    data = build_data(config)
    assert data.languages == ("vi", "ja", "en")
    assert [data.tokenizer.special_token_id(f"<{name}>") for name in data.languages] == [3, 4, 5]
    forward, backward = data.train[0], data.train[1]
    assert (forward.language, backward.language) == (0, 2)
    source, target = texts(data, "train")[0:2]
    assert (forward.ids[0], backward.ids[0]) == (3, 5) and source != target
    # An English sentence is on the same side in both files.
    sides = {
        side: [{text for i, text in enumerate(english(data, side, k)) if i % 2 == 0} for k in (0, 1)]
        for side in ("train", "valid", "test")
    }
    assert all(one == two for one, two in sides.values())
    assert set().union(*(one for one, _ in sides.values())) == {en for en, *_ in SENTENCES}
    batch = Batches(data.train, 512, pad_id=data.pad_id).batch(0, 0)
    assert batch.languages is not None and batch.ids[:, 0].tolist() == [3 + int(k) for k in batch.languages]


def english(data: Data, side: str, source: int) -> list[str]:
    store = data.stores[side][source]
    found = []
    for index in range(len(store)):
        ids = store.sequence(index)[0].tolist()
        found.append(data.tokenizer.decode(ids[1 : ids.index(2)]))
    return found


def test_the_tokenizer_sees_the_training_split_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    train = build.train_tokenizer

    def watched(found: Any, *rest: Any) -> Tokenizer:
        seen.extend(found)
        return train(seen, *rest)

    monkeypatch.setattr(build, "train_tokenizer", watched)
    data = build_data(language(documents(tmp_path / "a.jsonl")))
    assert seen == texts(data, "train") and texts(data, "test")


def test_chats_through_the_template_of_a_given_model(tmp_path: Path) -> None:
    from tests.text.small_tokenizers import CHATML, byte_level, write

    model = write(tmp_path / "model", byte_level(), {"eos_token": "<|im_end|>", "chat_template": CHATML})
    rows = [
        {"id": f"{n}", "messages": [{"role": "user", "content": f"{en} Who?"}], "answer": noun}
        for n, (en, noun, *_) in enumerate(SENTENCES)
    ]
    source = SourceConfig(path=jsonl(tmp_path / "a.jsonl", rows), answer="answer")
    config = DataConfig(
        task="chat", sources=(source,), splits=SplitConfig(0.1, 0.0), tokenizer=TokenizerConfig(str(model)), context=256
    )
    data, packed = build_data(config), build_data(replace(config, packed=True))
    tokenizer = load_tokenizer(model)
    assert len(data.train) + len(data.valid) == 240 and len(data.test) == 0
    answers = [data.train[i].targets[data.train[i].targets != -100].tolist() for i in range(len(data.train))]
    assert {tokenizer.decode(ids, skip_special_tokens=False) for ids in answers} == {f"{n}<|im_end|>" for n in NOUNS}
    assert len(packed.train) < len(data.train) / 3
    whole = [packed.train[i] for i in range(len(packed.train))]
    assert sum(len(row.ids) for row in whole) == data.train.lengths.sum()
    assert sum((row.targets != -100).sum() for row in whole) == sum(map(len, answers))


@pytest.mark.parametrize("task", ["language", "translation"])
def test_a_second_build_reads_no_row(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = (
        language(documents(tmp_path / "a.jsonl")) if task == "language" else translation(pairs(tmp_path / "a.jsonl"))
    )
    first = build_data(config)
    monkeypatch.setattr(build, "read_rows", None)
    again = build_data(config)
    assert again.fingerprint == first.fingerprint and again.report == first.report
    assert again.tokenizer.specification() == first.tokenizer.specification()
    for one, two in zip(texts(first, "train"), texts(again, "train"), strict=True):
        assert one == two
    assert not again.stores["train"][0].tokens.flags.writeable
    # The tokenizer that the run stored finds the same entry.
    again.tokenizer.save(tmp_path / "run")
    assert build_data(config, load_tokenizer(tmp_path / "run")).fingerprint == first.fingerprint


def test_files_count_by_their_contents(tmp_path: Path) -> None:
    config = language(documents(tmp_path / "a.jsonl"))
    first = build_data(config)
    (tmp_path / "moved").mkdir()
    moved = Path(config.sources[0].path).rename(tmp_path / "moved" / "a.jsonl")
    assert build_data(language(str(moved))).fingerprint == first.fingerprint
    with moved.open("a") as file:
        file.write('{"source": "s0", "text": "One more."}\n')
    changed = build_data(language(str(moved)))
    assert changed.fingerprint != first.fingerprint
    assert len(changed.stores["train"][0]) + len(changed.stores["valid"][0]) + len(changed.stores["test"][0]) == 241
    other = replace(config, splits=SplitConfig(0.3, 0.1), sources=(SourceConfig(path=str(moved)),))
    assert build_data(other).fingerprint != changed.fingerprint
    # What only says how examples are made of tokens, or how often they are seen, leaves the tokens as they are.
    kept = replace(config, context=32, documents="apart", sources=(SourceConfig(path=str(moved), weight=0.5),))
    assert build_data(kept).stores["train"][0].tokens.tolist() == changed.stores["train"][0].tokens.tolist()


@pytest.mark.parametrize("cached", [True, False])
def test_a_damaged_cache_is_said_and_built_anew(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    if not cached:
        monkeypatch.setenv("PLAIT_CACHE", "none")
    config = language(documents(tmp_path / "a.jsonl"))
    first = texts(build_data(config), "train")
    entries = list(cache.glob("*.plait")) if cached else []
    assert len(entries) == (2 if cached else 0)
    for entry in entries:
        data = bytearray(entry.read_bytes())
        data[5000] ^= 255
        entry.write_bytes(data)
    assert texts(build_data(config), "train") == first
    assert caplog.text.count("is ignored and written anew: it is damaged") == len(entries)
    caplog.clear()
    assert texts(build_data(config), "train") == first and not caplog.text


def test_a_leak_stops_the_run(tmp_path: Path) -> None:
    rows = [{"id": f"{n}", "text": "The kettle\tSINGS"[: 10 if n % 2 else None]} for n in range(40)]
    rows.append({"id": "other", "text": "Nobody else says this.", "split": "train"})
    config = language(jsonl(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match="the text 'The kettle.* stands in train .*a.jsonl:"):
        build_data(config)
    dropped = build_data(replace(config, splits=replace(HALF, on_leak="drop")), trained(["The kettle sings"]))
    sides = {side: texts(dropped, side) for side in ("train", "valid", "test")}
    # What is held out stays where it is; the rest of the 40 rows has gone, and is counted.
    assert sides["train"] == ["Nobody else says this."] and not sides["valid"]
    assert {" ".join(text.casefold().split()) for text in sides["test"]} == {"the kettle sings", "the kettle"}
    assert dropped.report.sources[0].left_out["on two sides"] == 40 - len(sides["test"])


def trained(found: list[str]) -> Tokenizer:
    return build.train_tokenizer(found, 300)


def test_text_in_nfd_is_trained_as_nfc(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    nfc = build_data(translation(pairs(path)))
    other = tmp_path / "b.jsonl"
    other.write_text(unicodedata.normalize("NFD", path.read_text("utf-8")), "utf-8")
    assert other.read_bytes() != path.read_bytes()
    nfd = build_data(translation(str(other)), nfc.tokenizer)
    assert nfd.stores["train"][0].tokens.tolist() == nfc.stores["train"][0].tokens.tolist()


def test_control_text_in_documents_is_text(tmp_path: Path) -> None:
    rows = [{"text": f"<eos> {en} <pad>", "split": "train"} for en, *_ in SENTENCES]
    data = build_data(language(jsonl(tmp_path / "a.jsonl", rows)))
    assert texts(data, "train") == [row["text"] for row in rows]
    assert (data.stores["train"][0].tokens == 1).sum() == len(rows)


def test_nothing_to_train_on_is_an_error_with_the_counts(tmp_path: Path) -> None:
    config = translation(pairs(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"nothing to train on: .*240 rows, 240 too long; train 0"):
        build_data(replace(config, context=2))
    with pytest.raises(DataError, match=r"nothing to train on: .*240 rows, 240 truncated, 240 without target; train 0"):
        build_data(replace(config, context=2, too_long="truncate"))
    with pytest.raises(DataError, match=r"240 rows, 240 filtered out; train 0"):
        build_data(replace(config, sources=(replace(config.sources[0], min_words=9),)))
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        build_data(replace(config, sources=()))


def test_a_given_tokenizer_needs_what_the_task_needs(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has no special token <vi>"):
        build_data(translation(pairs(tmp_path / "a.jsonl")), trained(["a"]))
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "split": "train"}]
    chat = DataConfig(task="chat", sources=(SourceConfig(path=jsonl(tmp_path / "b.jsonl", rows)),))
    with pytest.raises(DataError, match=r"b\.jsonl:1: the model has no chat template"):
        build_data(chat, trained(["a"]))


def test_weights_reach_the_batches(tmp_path: Path) -> None:
    one = SourceConfig(path=documents(tmp_path / "a.jsonl"), weight=0.5)
    two = SourceConfig(
        path=jsonl(tmp_path / "b.jsonl", [{"text": f"{n} other words", "split": "train"} for n in range(90)])
    )
    config = DataConfig(sources=(one, replace(two, weight=2.0)), splits=HALF, tokenizer=SMALL, context=16)
    data = build_data(config)
    first, second = (len(build_data(replace(config, sources=(s,)), data.tokenizer).train) for s in config.sources)
    batches = Batches(data.train, 64, pad_id=data.pad_id)
    seen = [member for index in range(batches.per_epoch) for member in batches.members(0, index)]
    assert sum(member < first for member in seen) == first // 2
    assert sum(member >= first for member in seen) == 2 * second


def test_the_place_of_an_item() -> None:
    assert Item("a.jsonl", 7, None, ()).place == "a.jsonl:7"
