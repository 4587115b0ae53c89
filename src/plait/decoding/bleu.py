"""BLEU and chrF2 through sacrebleu, with signature, bootstrap interval and paired comparison.

Hypotheses and references are brought to NFC first, both alike; nothing else about them is changed. sacrebleu comes
with the extra `train`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.errors import RequestError, UsageError

SAMPLES = 1000
# Languages that are not written with spaces between words, and what sacrebleu cuts them with; 13a for all others.
TOKENIZERS = {"ja": "ja-mecab", "zh": "zh", "ko": "ko-mecab"}
DEFAULT_TOKENIZER = "13a"
# sacrebleu's others download a model.
KNOWN_TOKENIZERS = ("13a", "char", "intl", "ja-mecab", "ko-mecab", "none", "zh")


@dataclass(frozen=True)
class Score:
    """A corpus score (0 .. 100). low, high: the 95% interval of bootstrap samples, None where none were drawn.

    signature: sacrebleu's, which says how the figure came about.
    """

    name: str
    score: float
    signature: str
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.name} {self.score:.2f}{interval} {self.signature}"


@dataclass(frozen=True)
class Comparison:
    """A metric of systems A and B on the same references. p_value: of the paired bootstrap (Koehn 2004), two-sided;
    1 for equal outputs, of which the bootstrap could say nothing."""

    name: str
    a: float
    b: float
    p_value: float
    signature: str


def tokenizer_of(language: str) -> str:
    """sacrebleu's tokenizer for a target language."""
    return TOKENIZERS.get(language, DEFAULT_TOKENIZER)


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = DEFAULT_TOKENIZER, samples: int = SAMPLES
) -> Score:
    """Corpus BLEU (Papineni et al. 2002) against one reference per hypothesis; samples 0: without an interval.

    Raises UsageError where sacrebleu or the tokenizer's own dependency is missing, RequestError for unequal counts.
    """
    return _corpus_score(_metric("BLEU", tokenizer), hypotheses, references, samples)


def chrf2(hypotheses: Sequence[str], references: Sequence[str], samples: int = SAMPLES) -> Score:
    """Corpus chrF2 (Popovic 2016): character n-grams up to 6, recall weighs twice. As `bleu` otherwise."""
    return _corpus_score(_metric("CHRF"), hypotheses, references, samples)


def paired_bootstrap(
    a: Sequence[str],
    b: Sequence[str],
    references: Sequence[str],
    tokenizer: str = DEFAULT_TOKENIZER,
    samples: int = SAMPLES,
) -> list[Comparison]:
    """BLEU and chrF2 of A against B on the same resampled test sets."""
    from sacrebleu.significance import PairedTest

    metrics = {"BLEU": _metric("BLEU", tokenizer), "chrF2": _metric("CHRF")}
    _check(a, references)
    _check(b, references)
    test = PairedTest([("A", _nfc(a)), ("B", _nfc(b))], metrics, [_nfc(references)], test_type="bs", n_samples=samples)
    result: Any = test()
    signatures, scores = result
    same = _nfc(a) == _nfc(b)
    return [
        Comparison(name, first.score, second.score, 1.0 if same else second.p_value, str(signatures[name]))
        for name, (first, second) in scores.items()
        if name in signatures
    ]


def sentence_bleu_of_ids(hypothesis: Sequence[int], references: Sequence[Sequence[int]]) -> float:
    """BLEU-4 of token ids against several references, exponentially smoothed, without regard to orders that are longer
    than the hypothesis."""
    metric = _metric("BLEU", "none", effective_order=True)
    hypothesis_text, *others = (" ".join(map(str, ids)) for ids in (hypothesis, *references))
    return metric.sentence_score(hypothesis_text, others).score


def _metric(name: str, tokenizer: str | None = None, **options: Any) -> Any:
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise UsageError('BLEU and chrF2 need sacrebleu: pip install "plait[train]"') from error
    if tokenizer is None:
        return getattr(metrics, name)(**options)
    if tokenizer not in KNOWN_TOKENIZERS:
        raise UsageError(f"unknown BLEU tokenizer {tokenizer!r} (known: {', '.join(KNOWN_TOKENIZERS)})")
    try:
        # `force`: text that looks tokenised is scored as it is; sacrebleu's warning would go past the log.
        return getattr(metrics, name)(tokenize=tokenizer, force=True, **options)
    except RuntimeError as error:
        language = tokenizer.split("-")[0]
        raise UsageError(
            f'the BLEU tokenizer {tokenizer} is not installed: pip install "sacrebleu[{language}]", or choose `char`'
        ) from error


def _corpus_score(metric: Any, hypotheses: Sequence[str], references: Sequence[str], samples: int) -> Score:
    _check(hypotheses, references)
    _in_plain_floats(metric)
    # One sample is sacrebleu's word for none.
    found = metric.corpus_score(_nfc(hypotheses), [_nfc(references)], n_bootstrap=max(samples, 1))
    signature = str(metric.get_signature())
    if samples <= 1:
        return Score(found.name, found.score, signature)
    return Score(found.name, found.score, signature, found._mean - found._ci, found._mean + found._ci)


def _in_plain_floats(metric: Any) -> None:
    """Have a metric's scores be floats of Python. sacrebleu 2.6's are numpy's but for those that are exactly 0, and the
    mean over its samples fails on the mixture."""
    compute = metric._compute_score_from_stats

    def plain(statistics: Any) -> Any:
        found = compute(statistics)
        found.score = float(found.score)
        return found

    metric._compute_score_from_stats = plain


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not references:
        raise RequestError(
            f"{len(hypotheses)} hypotheses for {len(references)} references: one of each is needed", field="references"
        )


def _nfc(texts: Sequence[str]) -> list[str]:
    return [unicodedata.normalize("NFC", text) for text in texts]
