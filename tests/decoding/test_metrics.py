"""Metrics against arithmetic by hand and brute force."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from plait.decoding import metrics
from plait.decoding.metrics import Continuations, distinct, diversity, measure, ngrams, repetition, self_bleu

ROWS = [[1, 2, 1, 2, 1], [3], [], [1, 2, 3]]


def test_ngrams_by_hand() -> None:
    # 1 2 | 2 1 | 1 2 | 2 1
    assert ngrams(ROWS[0], 2) == {(1, 2): 2, (2, 1): 2}
    assert ngrams(ROWS[1], 2) == {}


def test_distinct_by_hand() -> None:
    # Tokens 1, 2, 3 of 5 + 1 + 0 + 3 = 9; 2-grams 12, 21, 23 of 4 + 0 + 0 + 2 = 6.
    assert distinct(ROWS, 1) == 3 / 9
    assert distinct(ROWS, 2) == 3 / 9
    assert distinct(ROWS, 2, "ngram") == 3 / 6
    # Per continuation: 2/5, 1/1, none, 3/3; 2-grams over tokens 2/5, 0/1, none, 2/3; over 2-grams 2/4, -, -, 2/2.
    assert distinct(ROWS, 1, over="continuation") == pytest.approx((2 / 5 + 1 + 1) / 3)
    assert distinct(ROWS, 2, over="continuation") == pytest.approx((2 / 5 + 0 + 2 / 3) / 3)
    assert distinct(ROWS, 2, "ngram", over="continuation") == pytest.approx((2 / 4 + 1) / 2)


def test_repetition_by_hand() -> None:
    # Too-short ones are skipped: 1 - 2/4 and 1 - 2/2.
    assert repetition(ROWS, 2) == pytest.approx((0.5 + 0) / 2)
    assert repetition(ROWS, 2, over="corpus") == pytest.approx(1 - 3 / 6)
    # 3-grams: 121 212 121 -> 2 of 3; 123 -> 1 of 1
    assert repetition(ROWS, 3) == pytest.approx((1 / 3 + 0) / 2)


def test_diversity_by_hand() -> None:
    # 4-grams: 1212 2121 -> none repeated. (1 - 1/4)(1 - 1/6)(1 - 0)
    assert diversity(ROWS) == pytest.approx(3 / 4 * 5 / 6)
    assert diversity([[1, 2, 3]]) is None  # no 4-gram anywhere


def brute_force(rows: list[list[int]], n: int) -> dict[str, Fraction | None]:
    """Every n-gram as a slice, sets of strings, exact fractions."""
    grams = [[str(row[i : i + n]) for i in range(len(row) - n + 1)] for row in rows]
    all_grams = [g for one in grams for g in one]
    tokens = sum(len(row) for row in rows)
    own = [Fraction(len(set(g)), len(g)) for g in grams if g]
    per_token = [Fraction(len(set(g)), len(row)) for g, row in zip(grams, rows, strict=True) if row]
    return {
        "tokens": Fraction(len(set(all_grams)), tokens) if tokens else None,
        "ngrams": Fraction(len(set(all_grams)), len(all_grams)) if all_grams else None,
        "ngrams mean": sum(own, Fraction(0)) / len(own) if own else None,
        "tokens mean": sum(per_token, Fraction(0)) / len(per_token) if per_token else None,
    }


@pytest.mark.parametrize("seed", range(20))
def test_random_rows_agree_with_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 4, rng.integers(0, 9)).tolist() for _ in range(int(rng.integers(1, 7)))]
    for n in (1, 2, 3, 4):
        expected = brute_force(rows, n)
        found = {
            "tokens": distinct(rows, n),
            "ngrams": distinct(rows, n, "ngram"),
            "ngrams mean": distinct(rows, n, "ngram", "continuation"),
            "tokens mean": distinct(rows, n, "token", "continuation"),
        }
        for name, value in expected.items():
            assert found[name] == (None if value is None else pytest.approx(float(value)))
        rep = repetition(rows, n)
        assert rep == (None if expected["ngrams mean"] is None else pytest.approx(1 - float(expected["ngrams mean"])))


def test_perplexity() -> None:
    # 3 tokens of probability 1/4, 1/2, 1/8: (4 * 2 * 8) ** (1/3) = 4
    assert metrics.perplexity(math.log(4) + math.log(2) + math.log(8), 3) == pytest.approx(4)
    assert metrics.perplexity(0.0, 0) is None
    assert metrics.perplexity(1e6, 1) == math.inf


def bleu_by_hand(hypothesis: list[int], references: list[list[int]]) -> float:
    """Papineni et al. 2002, section 2, with exponential smoothing (Chen & Cherry 2014, method 3), 0 .. 100; orders
    that are longer than the hypothesis are left out, and nothing in common is 0."""
    if not set(hypothesis) & {token for reference in references for token in reference}:
        return 0.0
    log_precisions, smooth = [], 1.0
    for n in range(1, 5):
        own = [tuple(hypothesis[i : i + n]) for i in range(len(hypothesis) - n + 1)]
        if not own:
            break
        matched = 0
        for gram in set(own):
            most = max(sum(tuple(r[i : i + n]) == gram for i in range(len(r) - n + 1)) for r in references)
            matched += min(own.count(gram), most)
        if not matched:
            smooth *= 2
            log_precisions.append(math.log(1 / (smooth * len(own))))
        else:
            log_precisions.append(math.log(matched / len(own)))
    closest = min((abs(len(r) - len(hypothesis)), len(r)) for r in references)[1]
    brevity = min(0.0, 1 - closest / len(hypothesis))
    return 100 * math.exp(brevity + sum(log_precisions) / len(log_precisions))


def test_self_bleu_is_the_mean_of_each_against_the_others() -> None:
    pytest.importorskip("sacrebleu")
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6], [7, 2, 3, 4, 5], [10, 11, 12], [], [13]]
    there = [row for row in rows if row]
    expected = [bleu_by_hand(row, there[:i] + there[i + 1 :]) for i, row in enumerate(there)]
    assert self_bleu(rows) == pytest.approx(sum(expected) / len(expected))
    assert self_bleu([[1, 2, 3, 4]] * 3) == pytest.approx(100)
    assert self_bleu([[1], []]) is None


def test_the_subsample_of_self_bleu_is_evenly_spaced_and_fixed() -> None:
    pytest.importorskip("sacrebleu")
    rows = [[i, i + 1, i + 2, i + 3] for i in range(10)]
    assert self_bleu(rows, 3) == self_bleu([rows[0], rows[3], rows[6]])


def test_every_metric_names_its_formula() -> None:
    found = Continuations(ROWS, [True, False, True, False], nll=9 * math.log(3), scored=9, seconds=3.0)
    measured = measure(found, [name for name in metrics.METRICS if name != "self_bleu"])
    assert measured["perplexity"].value == pytest.approx(3)
    assert measured["distinct_2"].value == 3 / 9
    assert measured["distinct_2_ngrams"].value == 3 / 6
    assert measured["distinct_1_mean"].value == pytest.approx(0.8)
    assert measured["rep_2"].value == pytest.approx(0.25)
    assert measured["rep_2_corpus"].value == pytest.approx(0.5)
    assert measured["mean_length"].value == 9 / 4
    assert measured["ended"].value == 1 / 2
    assert measured["tokens_per_s"].value == 3
    formulas = [formula for _, formula in measured.values()]
    assert all(formulas) and len(set(formulas)) == len(formulas)


def test_what_was_not_measured_has_no_value() -> None:
    measured = measure(Continuations([], []), ["perplexity", "tokens_per_s", "distinct_1", "mean_length", "ended"])
    assert [value for value, _ in measured.values()] == [None] * 5
