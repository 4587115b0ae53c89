"""Evaluation of a run: every figure against a slow computation by hand, over rows that are alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli.main import main
from plait.decoding.beam import Beams, beam_search
from plait.decoding.bleu import bleu
from plait.errors import DataError, UsageError
from plait.model.decoder import Decoder, Trace
from plait.studies.run_plots import losses_of, read_log, routing_of
from plait.training.continued_documents import passages_of
from plait.training.data.build import Data
from plait.training.evaluate import Evaluation, Settings, compare, evaluate
from plait.training.expert_counts import ExpertCounts, total_variation
from plait.training.translations import pairs_of, translate
from tests.training.runs import make_run, write_documents, write_pairs

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("sacrebleu")

CHARACTERS = {"ja": "char"}  # MeCab is not everywhere


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("pairs")
    return make_run(directory, "translation", write_pairs(directory))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("documents")
    return make_run(directory, "language", write_documents(directory), context=64)


@pytest.fixture(scope="module")
def translated(translator: Any) -> Any:
    return evaluate(translator[0], Settings(batch_tokens=600, max_new_tokens=12, tokenizers=CHARACTERS, samples=50))


def by_hand(decoder: Decoder, data: Data) -> dict[str, tuple[float, int]]:
    """Summed -log p and targets by language, one sequence at a time in float64."""
    found: dict[str, tuple[float, int]] = {}
    for i in range(len(data.test)):
        example = data.test[i]
        with torch.inference_mode():
            log_p = decoder.logits(decoder(torch.tensor(example.ids))).double().log_softmax(-1)
        places = [k for k, target in enumerate(example.targets) if target >= 0]
        nll = -sum(float(log_p[k, example.targets[k]]) for k in places)
        name = data.languages[example.language] if example.language is not None else ""
        before = found.get(name, (0.0, 0))
        found[name] = (before[0] + nll, before[1] + len(places))
    return found


def test_perplexity_is_weighted_by_tokens_in_whole_and_by_language(translator: Any, translated: Any) -> None:
    expected = by_hand(translator[3], translator[2])
    for name, (nll, count) in expected.items():
        part = translated.figures["languages"][name]
        assert part["targets"] == count
        assert part["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    nll, count = (sum(column) for column in zip(*expected.values(), strict=True))
    assert translated.figures["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert translated.figures["checkpoint"] == "step-00000003"


def test_translations_are_those_of_each_pair_alone_in_the_order_of_the_data(translator: Any, translated: Any) -> None:
    _, _, data, decoder = translator
    pairs, cut = pairs_of(data, "test")
    assert (len(pairs), cut, len(translated.texts)) == (28, 0, 28)
    for pair, text in zip(pairs, translated.texts, strict=True):
        alone = translate(decoder, data.tokenizer, [pair], batch_tokens=1, max_new_tokens=12)[0]
        assert text == {
            "language": pair.language,
            "source": data.tokenizer.decode(pair.prompt),
            "hypothesis": alone.hypothesis,
            "reference": alone.reference,
            "tokens": alone.tokens,
            "ended": alone.ended,
        }
    assert [t["language"] for t in translated.texts] == ["vi"] * 14 + ["ja"] * 14
    # The tokenizer gives back what the file has.
    file = (Path(translator[1].data.sources[1].path)).read_text(encoding="utf-8").splitlines()
    assert [t["reference"] for t in translated.texts[14:]] == [line.split("\t")[2] for line in file[-14:]]


def test_bleu_is_that_of_the_texts_with_its_signature_and_interval(translated: Any) -> None:
    for language, tokenizer in (("vi", "13a"), ("ja", "char")):
        own = [t for t in translated.texts if t["language"] == language]
        part = translated.figures["translation"]["languages"][language]
        expected = bleu([t["hypothesis"] for t in own], [t["reference"] for t in own], tokenizer, 50)
        assert part["bleu"] == expected.to_json()
        assert f"tok:{tokenizer}" in part["bleu"]["signature"] and "bs:50" in part["bleu"]["signature"]
        assert part["chrf2"]["name"] == "chrF2" and part["pairs"] == 14


def test_a_limit_takes_evenly_spaced_pairs(translator: Any) -> None:
    data = translator[2]
    every, some = pairs_of(data, "test")[0], pairs_of(data, "test", 4)[0]
    assert some == [every[i] for i in (0, 7, 14, 21)]


@pytest.mark.slow
def test_a_row_s_room_ends_with_the_model_s_positions(translator: Any) -> None:
    _, _, data, decoder = translator
    pairs = pairs_of(data, "test", 6)[0]
    found = translate(decoder, data.tokenizer, pairs, batch_tokens=4096, max_new_tokens=1000)
    for pair, translation in zip(pairs, found, strict=True):
        assert translation.ended or len(pair.prompt) + translation.tokens == 256


def test_beams_translate_as_beam_search_does(translator: Any) -> None:
    _, _, data, decoder = translator
    pairs = pairs_of(data, "test", 5)[0]
    found = translate(decoder, data.tokenizer, pairs, batch_tokens=400, max_new_tokens=7, width=3)
    for pair, translation in zip(pairs, found, strict=True):
        best = beam_search(decoder, [pair.prompt], 7, Beams(3), eos_ids=[1])[0][0]
        assert (translation.tokens, translation.ended) == (len(best.tokens), best.ended)
        assert translation.hypothesis == data.tokenizer.decode(best.tokens)


def test_two_evaluations_are_compared_on_the_same_pairs(translated: Any, tmp_path: Path) -> None:
    settings = Settings(samples=50, tokenizers=CHARACTERS)
    perfect = Evaluation({}, [t | {"hypothesis": t["reference"]} for t in translated.texts])
    perfect.save(tmp_path / "perfect")
    found = compare(translated, tmp_path / "perfect", settings)["languages"]
    assert list(found) == ["vi", "ja"]
    for name, part in found.items():
        assert [one["name"] for one in part] == ["BLEU", "chrF2"]
        figures = translated.figures["translation"]["languages"][name]
        assert [one["a"] for one in part] == pytest.approx([figures["bleu"]["score"], figures["chrf2"]["score"]])
        assert all(one["b"] == pytest.approx(100) and one["p_value"] < 0.05 for one in part)
    Evaluation({}, translated.texts[1:]).save(tmp_path / "shorter")
    with pytest.raises(UsageError, match="not of the same pairs"):
        compare(translated, tmp_path / "shorter", settings)
    with pytest.raises(UsageError, match=r"has no texts\.jsonl"):
        compare(translated, tmp_path, settings)


def test_routing_is_counted_by_layer_language_side_and_expert(translator: Any, translated: Any) -> None:
    _, _, data, decoder = translator
    expected = {row: [[0] * 3 for _ in range(2)] for row in ("vi source", "ja source", "vi target", "ja target")}
    for i in range(len(data.test)):
        example = data.test[i]
        trace = Trace(router=True)
        with torch.inference_mode():
            decoder(torch.tensor(example.ids), trace=trace)
        for place, layer in enumerate(trace.routing):
            for position, chosen in enumerate(trace.routing[layer].ids.tolist()):
                side = "target" if example.roles[position] == 1 else "source"
                for expert in chosen:
                    expected[f"{data.languages[example.language]} {side}"][place][expert] += 1
    found = translated.figures["experts"]
    assert found["layers"] == [0, 1]
    assert list(found["slots"]) == list(expected) and found["slots"] == expected


def test_separation_is_half_the_summed_difference_of_shares() -> None:
    counts = ExpertCounts((0, 4), {
        "vi source": [[1, 1, 2], [4, 0, 0]],
        "ja source": [[2, 1, 1], [0, 4, 0]],
        "vi target": [[2, 2, 4], [2, 2, 0]],
        "ja target": [[0, 0, 0], [1, 1, 2]],
    })  # fmt: skip
    # (.25, .25, .5) against (.5, .25, .25): half of .25 + 0 + .25
    found = counts.separation()
    assert found["vi source / ja source"] == [0.25, 1.0]
    assert found["vi source / vi target"] == [0.0, 0.5]
    assert set(found) == {
        "vi source / ja source", "vi source / vi target", "ja source / ja target", "vi target / ja target"
    }  # fmt: skip
    assert counts.heatmaps()[4] == [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]
    # entropy of (.25, .25, .5) is 1.5 ln 2
    assert counts.entropy("vi source") == pytest.approx([1.5 * math.log(2) / math.log(3), 0.0])
    assert total_variation([1.0, 0.0], [0.0, 1.0]) == 1.0


def test_a_language_model_is_judged_by_bytes_and_continuations(writer: Any) -> None:
    run, _, data, decoder = writer
    found = evaluate(run, Settings(limit=3, samples=20)).figures
    nll, count = by_hand(decoder, data)[""]
    store = data.stores["test"][0]
    # All tokens but the very first are targets; eos has no bytes.
    ids = [i for i in store.tokens[1:].tolist() if i != 1]
    assert found["bytes"] == sum(len(data.tokenizer.token_bytes(i)) for i in ids)
    assert found["bits_per_byte"] == pytest.approx(nll / math.log(2) / found["bytes"], rel=1e-5)
    assert found["targets"] == count == len(store.tokens) - 1
    continued = found["continuations"]
    assert continued["documents"] == 3 and continued["prompt_tokens"] == 128
    assert continued["metrics"]["perplexity"] > 1 and continued["formulas"]["distinct_2"]
    assert "tok:13a" in continued["bleu"]["signature"]
    assert list(found["experts"]["slots"]) == ["all"]
    assert [sum(layer) for layer in found["experts"]["slots"]["all"]] == [2 * count] * 2


def test_passages_are_the_end_of_a_first_half_and_the_beginning_of_the_second(writer: Any) -> None:
    data = writer[2]
    passages, documents = passages_of(data, "test")
    store = data.stores["test"][0]
    assert documents == len(store) == 6
    long = [tokens for tokens in (store.sequence(i)[0][:-1].tolist() for i in range(6)) if len(tokens) >= 256]
    assert 0 < len(long) == len(passages)
    for tokens, passage in zip(long, passages, strict=True):
        half = len(tokens) // 2
        assert passage.prompt + passage.reference == tokens[half - 128 : half + 64]
        assert (len(passage.prompt), len(passage.reference)) == (128, 64)


# What cannot be evaluated


def test_what_is_no_run_or_has_no_such_checkpoint_is_named(translator: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no training run \(it has no config.yaml\)"):
        evaluate(tmp_path, Settings())
    with pytest.raises(UsageError, match=r"no whole checkpoint of step 4 \(there are: 3\)"):
        evaluate(translator[0], Settings(step=4))


def test_an_empty_split_is_an_error(tmp_path: Path) -> None:
    sources = write_pairs(tmp_path)
    for source in sources:
        source["split"] = "train"
    run = make_run(tmp_path, "translation", sources)[0]
    with pytest.raises(DataError, match="the test split of .* is empty"):
        evaluate(run, Settings())


def test_other_data_than_the_run_was_trained_on_are_said(
    translator: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = next(translator[0].glob("checkpoints/*/training.json"))
    before = state.read_text()
    # Of the same length, as the marker has it.
    state.write_text(before.replace(translator[2].fingerprint, "0" * 32))
    try:
        evaluate(translator[0], Settings(texts=False))
    finally:
        state.write_text(before)
    assert "not what it was trained on" in caplog.text


# The command


@pytest.mark.slow
def test_the_command_writes_figures_texts_and_plots(
    translator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run = translator[0]
    records = [
        {"kind": "train", "step": 1, "tokens": 500, "loss": 5.5,
         "routing": {"balance_loss": 2.0, "0": {"load": [0.5, 0.3, 0.2], "entropy": 0.94}}},
        {"kind": "valid", "step": 1, "tokens": 500, "loss": 5.6},
    ]  # fmt: skip
    (run / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"kind": "tra')
    out = tmp_path / "out"
    words = ["evaluate", str(run), "--limit", "4", "--max-new-tokens", "8", "--out", str(out), "--threads", "1"]
    assert main([*words, "--bleu-tokenizer", "ja=char", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "evaluation.json").read_text())
    assert len((out / "texts.jsonl").read_text().splitlines()) == 4
    names = {"evaluation.json", "texts.jsonl"}
    names |= {f"{name}.{kind}" for name in ("loss", "load", "experts", "separation") for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == names
    assert main([*words, "--bleu-tokenizer", "ja=char", "--no-plots"]) == 0
    shown = capsys.readouterr().out
    assert "vi source / ja source" in shown and "tok:char" in shown and "perplexity" in shown
    more = [
        "--bleu-tokenizer",
        "ja=char",
        "--beams",
        "2",
        "--against",
        str(out),
        "--out",
        str(tmp_path / "b"),
        "--json",
    ]
    assert main([*words, *more, "--no-plots"]) == 0
    beams = json.loads(capsys.readouterr().out)
    assert beams["translation"]["strategy"] == "beams 2, pool, length penalty 1"
    assert beams["against"]["languages"]["vi"][0]["b"] == printed["translation"]["languages"]["vi"]["bleu"]["score"]
    assert main([*words, "--bleu-tokenizer", "char"]) == 2
    assert "write LANGUAGE=NAME" in capsys.readouterr().err


def test_what_is_drawn_over_time_is_the_log() -> None:
    records = [
        {"kind": "train", "tokens": 10, "loss": 4.0,
         "routing": {"z_loss": 1.0, "2": {"load": [0.9, 0.1], "entropy": 0.4},
                     "3": {"load": [0.5, 0.5], "entropy": 1}}},
        {"kind": "sample", "tokens": 10, "samples": []},
        {"kind": "train", "tokens": 20, "loss": None},
        {"kind": "valid", "tokens": 20, "loss": 3.0},
    ]  # fmt: skip
    assert losses_of(records) == {"training": ([10, 20], [4.0, None]), "validation": ([20], [3.0])}
    assert routing_of(records) == ([10], {2: [[0.9, 0.1]], 3: [[0.5, 0.5]]}, {2: [0.4], 3: [1]})


def test_a_run_without_a_log_has_no_curves(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []
