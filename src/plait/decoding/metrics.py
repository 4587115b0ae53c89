"""Metrics of continuations, as lists of token ids. Each knows its formula and prints it.

`over="corpus"` counts all continuations together (n-grams never cross from one to the next); `over="continuation"`
gives each its own value and averages those that have one. A value that does not exist (no tokens, every continuation
too short) is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, inf, prod
from typing import Literal, NamedTuple

Tokens = Sequence[int]
Over = Literal["corpus", "continuation"]
SELF_BLEU_SAMPLE = 100


@dataclass(frozen=True)
class Continuations:
    """What was generated. tokens: per continuation, without its end token. ended: whether it had one.

    nll: summed -log p in nats of `scored` tokens under the unfiltered model. seconds: that generating took.
    """

    tokens: Sequence[Tokens]
    ended: Sequence[bool]
    nll: float | None = None
    scored: int = 0
    seconds: float | None = None


class Measured(NamedTuple):
    """A metric's value, None where it does not exist, and the formula that it was computed by."""

    value: float | None
    formula: str


def perplexity(nll: float, tokens: int) -> float | None:
    """exp(nll / tokens), nll in nats; infinite where that exceeds a float."""
    if not tokens:
        return None
    mean = nll / tokens
    return exp(mean) if mean < 700 else inf


def ngrams(tokens: Tokens, n: int) -> Counter[tuple[int, ...]]:
    """How often each n-gram stands in the tokens."""
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


def distinct(
    rows: Sequence[Tokens], n: int, per: Literal["token", "ngram"] = "token", over: Over = "corpus"
) -> float | None:
    """Distinct n-grams / generated tokens (Li et al. 2016), or per="ngram" / n-grams."""
    if over == "continuation":
        return _mean(distinct([row], n, per) for row in rows)
    counts = _ngrams_of(rows, n)
    return _ratio(len(counts), sum(map(len, rows)) if per == "token" else counts.total())


def repetition(rows: Sequence[Tokens], n: int, over: Over = "continuation") -> float | None:
    """rep-n = 1 - unique n-grams / all n-grams (Welleck et al. 2020)."""
    unique = distinct(rows, n, "ngram", over)
    return None if unique is None else 1 - unique


def diversity(rows: Sequence[Tokens], over: Over = "continuation") -> float | None:
    """The product over n = 2, 3, 4 of 1 - rep-n (Su et al. 2022)."""
    kept = [distinct(rows, n, "ngram", over) for n in (2, 3, 4)]
    return prod(value for value in kept if value is not None) if None not in kept else None


def self_bleu(rows: Sequence[Tokens], sample_size: int = SELF_BLEU_SAMPLE) -> float | None:
    """Mean sentence BLEU-4 (0 .. 100) of each sampled continuation against the other sampled ones (Zhu et al. 2018).

    The sample is evenly spaced over the continuations, so the same for every strategy; tokens are the model's, empty
    continuations stay out. None with fewer than two. Needs sacrebleu.
    """
    from plait.decoding.bleu import sentence_bleu_of_ids

    count = min(sample_size, len(rows))
    sample = [row for row in (rows[i * len(rows) // count] for i in range(count)) if len(row)]
    if len(sample) < 2:
        return None
    return _mean(sentence_bleu_of_ids(row, sample[:i] + sample[i + 1 :]) for i, row in enumerate(sample))


def mean_length(rows: Sequence[Tokens]) -> float | None:
    """Tokens per continuation."""
    return _ratio(sum(map(len, rows)), len(rows))


def _ngrams_of(rows: Iterable[Tokens], n: int) -> Counter[tuple[int, ...]]:
    total: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        total.update(ngrams(row, n))
    return total


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return _ratio(sum(there), len(there))


@dataclass(frozen=True)
class Metric:
    """A row of `METRICS`: the formula's words, and what computes it."""

    formula: str
    compute: Callable[[Continuations], float | None]


def _rows(function: Callable[..., float | None], **options: object) -> Callable[[Continuations], float | None]:
    return lambda found: partial(function, **options)(found.tokens)


_AVERAGED = "averaged over continuations that have one"

METRICS: dict[str, Metric] = {
    "perplexity": Metric(
        "exp(sum nll / sum tokens) under the unfiltered model",
        lambda found: None if found.nll is None else perplexity(found.nll, found.scored),
    ),
    **{
        f"distinct_{n}": Metric(f"distinct {n}-grams / generated tokens, corpus", _rows(distinct, n=n))
        for n in (1, 2, 3)
    },
    **{
        f"distinct_{n}_mean": Metric(
            f"distinct {n}-grams / generated tokens, {_AVERAGED}", _rows(distinct, n=n, over="continuation")
        )
        for n in (1, 2, 3)
    },
    **{
        f"distinct_{n}_ngrams": Metric(f"distinct {n}-grams / all {n}-grams, corpus", _rows(distinct, n=n, per="ngram"))
        for n in (2, 3)
    },
    **{f"rep_{n}": Metric(f"1 - unique / all {n}-grams, {_AVERAGED}", _rows(repetition, n=n)) for n in (2, 3, 4)},
    **{
        f"rep_{n}_corpus": Metric(f"1 - unique / all {n}-grams, corpus", _rows(repetition, n=n, over="corpus"))
        for n in (2, 3, 4)
    },
    "diversity": Metric("product over n = 2..4 of (1 - rep-n)", _rows(diversity)),
    "diversity_corpus": Metric("product over n = 2..4 of (1 - rep-n), corpus", _rows(diversity, over="corpus")),
    "self_bleu": Metric(
        f"mean sentence BLEU-4 against the others, {SELF_BLEU_SAMPLE} evenly spaced continuations", _rows(self_bleu)
    ),
    "mean_length": Metric("generated tokens / continuations", _rows(mean_length)),
    "ended": Metric(
        "continuations that an end token ended / continuations",
        lambda found: _ratio(sum(found.ended), len(found.ended)),
    ),
    "tokens_per_s": Metric(
        "generated tokens / seconds",
        lambda found: None if found.seconds is None else _ratio(sum(map(len, found.tokens)), found.seconds),
    ),
}


def measure(found: Continuations, names: Iterable[str] | None = None) -> dict[str, Measured]:
    """The named metrics (all of `METRICS` unless given), each with its formula."""
    return {
        name: Measured(METRICS[name].compute(found), METRICS[name].formula)
        for name in (METRICS if names is None else names)
    }
