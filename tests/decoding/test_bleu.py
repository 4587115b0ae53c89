"""BLEU and chrF2: formulas in float64, sacrebleu's command line, intervals, pairs, and languages without spaces."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from plait.decoding.bleu import bleu, chrf2, paired_bootstrap, tokenizer_of
from plait.errors import RequestError, UsageError

pytest.importorskip("sacrebleu")

REFERENCES = [
    "The file could not be opened for writing.",
    "Select the printer that you want to use, then click Next.",
    "Unable to connect to the server: the connection was refused.",
    "Remove all of the selected items from the list",
]
HYPOTHESES = [
    "The file could not be opened.",
    "Choose the printer that you want to use, then press Next.",
    "Cannot connect to the server: connection refused.",
    "Remove all of the selected items from the list",
]


def words(text: str) -> list[str]:
    """What 13a makes of these sentences: punctuation apart."""
    for mark in ".,:":
        text = text.replace(mark, f" {mark}")
    return text.split()


def test_bleu_is_papinenis_formula() -> None:
    matched, total = [0] * 4, [0] * 4
    for hypothesis, reference in zip(map(words, HYPOTHESES), map(words, REFERENCES), strict=True):
        for n in range(1, 5):
            own, theirs = (Counter(zip(*(x[i:] for i in range(n)), strict=False)) for x in (hypothesis, reference))
            matched[n - 1] += (own & theirs).total()
            total[n - 1] += own.total()
    ours, theirs = (sum(len(words(text)) for text in texts) for texts in (HYPOTHESES, REFERENCES))
    expected = 100 * math.exp(
        min(0, 1 - theirs / ours) + sum(math.log(m / t) for m, t in zip(matched, total, strict=True)) / 4
    )
    found = bleu(HYPOTHESES, REFERENCES, samples=0)
    assert found.score == pytest.approx(expected)
    assert (found.name, found.low) == ("BLEU", None)
    assert "tok:13a" in found.signature and "nrefs:1" in found.signature


def test_chrf2_is_popovics_formula() -> None:
    """n-grams of characters without spaces; per order precision and recall over the corpus, averaged over the orders,
    F with beta 2."""
    precision, recall = [], []
    for n in range(1, 7):
        matched = own_total = reference_total = 0
        for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
            own, theirs = (
                Counter(text[i : i + n] for i in range(len(text) - n + 1))
                for text in (hypothesis.replace(" ", ""), reference.replace(" ", ""))
            )
            matched += (own & theirs).total()
            own_total += own.total()
            reference_total += theirs.total()
        precision.append(matched / own_total)
        recall.append(matched / reference_total)
    p, r = sum(precision) / 6, sum(recall) / 6
    assert chrf2(HYPOTHESES, REFERENCES, samples=0).score == pytest.approx(100 * 5 * p * r / (4 * p + r))


@pytest.mark.slow
def test_figure_interval_and_signature_are_those_of_sacrebleus_command(tmp_path: Path) -> None:
    for name, texts in (("hyp", HYPOTHESES * 5), ("ref", REFERENCES * 5)):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts))
    found = bleu(HYPOTHESES * 5, REFERENCES * 5)
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        "ref",
        "-i",
        "hyp",
        "-m",
        "bleu",
        "--confidence",
        "-f",
        "text",
        "-w",
        "4",
    ]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    # BLEU|signature = score (μ = mean ± half) precisions
    assert found.signature in printed
    assert f" = {found.score:.4f} " in printed
    assert f"(μ = {(found.low + found.high) / 2:.4f} ± {(found.high - found.low) / 2:.4f})" in printed
    assert found.low < found.score < found.high


def test_samples_without_anything_in_common_are_scored_too() -> None:
    """A quarter of the samples draw the first pair twice, and score 0."""
    for score in (chrf2(["xyz", "abc"], ["qqq", "abc"]), bleu(["x y z w", "a b c d"], ["q q q q", "a b c d"])):
        assert score.low == pytest.approx(0, abs=10) and score.high > 90


def test_a_system_against_itself_and_a_better_one() -> None:
    hypotheses, references = HYPOTHESES * 10, REFERENCES * 10
    worse = [" ".join(text.split()[:-2]) for text in hypotheses]
    for found in paired_bootstrap(hypotheses, worse, references, samples=200):
        assert found.a > found.b and found.p_value < 0.05
    for found in paired_bootstrap(hypotheses, hypotheses, references, samples=200):
        assert found.a == found.b and found.p_value > 0.5
    names = [found.name for found in paired_bootstrap(hypotheses, worse, references, samples=2)]
    assert names == ["BLEU", "chrF2"]


JA_REFERENCE = ["ファイルを開くことができませんでした。"]
JA_HYPOTHESIS = ["ファイルを閉じることができませんでした。"]


def test_japanese_is_not_scored_as_one_word() -> None:
    assert [tokenizer_of(language) for language in ("ja", "vi", "en")] == ["ja-mecab", "13a", "13a"]
    as_words = bleu(JA_HYPOTHESIS, JA_REFERENCE, samples=0).score
    as_characters = bleu(JA_HYPOTHESIS, JA_REFERENCE, "char", samples=0)
    assert as_words < 20 < 60 < as_characters.score
    assert "tok:char" in as_characters.signature


def test_mecab_cuts_japanese_or_its_absence_is_an_error() -> None:
    if importlib.util.find_spec("MeCab") is None:
        with pytest.raises(UsageError, match=r"ja-mecab is not installed: pip install .sacrebleu\[ja\]"):
            bleu(JA_HYPOTHESIS, JA_REFERENCE, "ja-mecab")
    else:
        found = bleu(JA_HYPOTHESIS, JA_REFERENCE, "ja-mecab", samples=0)
        assert "tok:ja-mecab" in found.signature and found.score > 40


def test_both_sides_are_brought_to_nfc() -> None:
    composed = [unicodedata.normalize("NFC", "Bệnh viện đã đóng cửa từ hôm qua.")]
    taken_apart = [unicodedata.normalize("NFD", composed[0])]
    assert composed != taken_apart
    assert bleu(taken_apart, composed, samples=0).score == pytest.approx(100)
    assert chrf2(composed, taken_apart, samples=0).score == pytest.approx(100)
    # Where the tone mark stands in a word is spelling, and stays what it is.
    assert chrf2(["hòa"], ["hoà"], samples=0).score < 100


def test_bad_requests_are_named() -> None:
    with pytest.raises(RequestError, match="2 hypotheses for 1 references"):
        bleu(["a", "b"], ["a"])
    with pytest.raises(RequestError, match="0 hypotheses"):
        chrf2([], [])
    with pytest.raises(UsageError, match="unknown BLEU tokenizer 'mecab'"):
        bleu(["a"], ["a"], "mecab")


def test_without_sacrebleu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UsageError, match=r"plait\[train\]"):
        bleu(["a"], ["a"])
