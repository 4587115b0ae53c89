"""`plait evaluate`: a run's checkpoint on held-out data.

Perplexity by language; of a translation model BLEU and chrF2 of its greedy translations; of a language model bits per
byte and its continuations of documents; of a mixture, which expert received what. One document of plain figures comes
out, with the texts beside it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plait.decoding.bleu import SAMPLES, paired_bootstrap, tokenizer_of
from plait.engine.loading import check_device
from plait.errors import DataError, UsageError
from plait.jsonfile import read_json, read_text
from plait.model.decoder import Decoder
from plait.training.batch import Batch
from plait.training.config import RunConfig, config_of
from plait.training.continued_documents import PROMPT_TOKENS, REFERENCE_TOKENS, continue_documents, passages_of
from plait.training.data.batches import Batches
from plait.training.data.build import Data, build_data
from plait.training.data.constants import IGNORE
from plait.training.expert_counts import count_experts, has_experts
from plait.training.precision import choose_precision
from plait.training.recipe import parse_yaml
from plait.training.translations import MAX_NEW_TOKENS, Translation, pairs_of, scores, translate
from plait.training.validation import validate
from plait.weights.load import load
from plait.weights.runs import CONFIG, STATE, complete, directory_of, model_of_run, steps_of

logger = logging.getLogger("plait.training")

TOKENIZER = "tokenizer"  # folder of a run
FIGURES, TEXTS = "evaluation.json", "texts.jsonl"
# (what is being done, how much is done, of how much; 0: unknown)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """What to evaluate. split: test or valid. step: of the checkpoint, None for the best one, else the last.

    limit: pairs that are translated or documents that are continued, None for all. batch_tokens: positions of a
    forward. width: of the beams that translate; 1 is greedy. samples: of the bootstrap, 0 for none. tokenizers:
    language -> BLEU tokenizer, in place of the usual one. texts: False leaves translations and continuations out.
    """

    split: Literal["test", "valid"] = "test"
    step: int | None = None
    limit: int | None = None
    batch_tokens: int = 16_384
    max_new_tokens: int = MAX_NEW_TOKENS
    width: int = 1
    samples: int = SAMPLES
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    texts: bool = True
    device: str = "cpu"


@dataclass(frozen=True)
class Evaluation:
    """figures: what `--json` prints. texts: translations or continuations, an object each."""

    figures: dict[str, Any]
    texts: list[dict[str, Any]]

    def save(self, directory: Path) -> list[Path]:
        """Write the figures, and the texts as JSON lines."""
        directory.mkdir(parents=True, exist_ok=True)
        figures, texts = directory / FIGURES, directory / TEXTS
        figures.write_text(json.dumps(self.figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        lines = [json.dumps(text, ensure_ascii=False) + "\n" for text in self.texts]
        texts.write_text("".join(lines), encoding="utf-8")
        return [figures, texts]


def evaluate(run: Path, settings: Settings, progress: Progress | None = None) -> Evaluation:
    """Evaluate a run. Raises UsageError for what is no run or has no such checkpoint, DataError for an empty split."""
    progress = progress or (lambda stage, done, total: None)
    check_device(settings.device)
    config, checkpoint = run_config(run), _checkpoint(run, settings.step)
    from plait.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run / TOKENIZER if (run / TOKENIZER).is_dir() else checkpoint)
    data = build_data(config.data, tokenizer, progress)
    state = read_json(checkpoint / STATE)
    if state.get("data") != data.fingerprint:
        logger.warning("%s: its data are not what it was trained on; held-out rows may have been trained on", run)
    examples = data.test if settings.split == "test" else data.valid
    if not len(examples):
        raise DataError(f"the {settings.split} split of {run} is empty: choose the other one, or evaluate another run")
    batches = Batches(examples, settings.batch_tokens, pad_id=data.pad_id, shuffle=False)
    decoder = load(checkpoint, "fp32", settings.device).eval()
    figures: dict[str, Any] = {
        "run": str(run),
        "checkpoint": checkpoint.name,
        "step": state.get("step"),
        "tokens": state.get("tokens"),
        "task": config.data.task,
        "split": settings.split,
        "parameters": decoder.param_counts(),
    }
    precision = choose_precision("fp32", settings.device)
    figures |= validate(decoder, _seen(batches, "perplexity", progress), precision, data.languages)
    if has_experts(decoder):
        figures["experts"] = count_experts(decoder, _seen(batches, "experts", progress), data.languages).to_json()
    texts: list[dict[str, Any]] = []
    if config.data.task == "language":
        figures |= bits_per_byte(figures["loss"], data, _seen(batches, "bytes", progress))
    if settings.texts:
        texts = _TEXTS[config.data.task](decoder, data, settings, figures, progress)
    return Evaluation(figures, texts)


def compare(found: Evaluation, directory: Path, settings: Settings) -> dict[str, Any]:
    """By language, BLEU and chrF2 of the translations (a) and of those in another evaluation's directory (b), with the
    p-value of the paired bootstrap. Raises UsageError where those are not of the same pairs."""
    file = directory / TEXTS
    if not file.is_file():
        raise UsageError(f"{directory} has no {TEXTS}: give the directory that plait evaluate wrote its files to")
    others = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    pairs = [
        [(t.get("language"), t.get("source"), t.get("reference")) for t in texts] for texts in (found.texts, others)
    ]
    if pairs[0] != pairs[1] or not all("hypothesis" in t for t in (*found.texts, *others)):
        raise UsageError(
            f"{file} is not of the same pairs in the same order: evaluate both with the same data and limit"
        )
    languages: dict[str, Any] = {}
    for language in dict.fromkeys(t["language"] for t in others):
        own, theirs = ([t for t in texts if t["language"] == language] for texts in (found.texts, others))
        languages[language] = [
            asdict(one)
            for one in paired_bootstrap(
                [t["hypothesis"] for t in own],
                [t["hypothesis"] for t in theirs],
                [t["reference"] for t in own],
                settings.tokenizers.get(language) or tokenizer_of(language),
                max(settings.samples, 2),
            )
        ]
    return {"directory": str(directory), "languages": languages}


def run_config(run: Path) -> RunConfig:
    """The resolved configuration of a run. Raises UsageError where there is none."""
    file = run / CONFIG
    if not file.is_file():
        raise UsageError(f"{run} is no training run (it has no {CONFIG}); give the directory that plait train wrote")
    return config_of(parse_yaml(read_text(file), str(file)))


def bits_per_byte(loss: float, data: Data, batches: Any) -> dict[str, Any]:
    """{"bytes", "bits_per_byte"}: nats of all targets / ln 2 / bytes of their text. A document's end costs nats and has
    no bytes."""
    counts = np.zeros(data.tokenizer.vocab_size, np.int64)
    for batch in batches:
        targets = batch.targets[batch.targets != IGNORE].numpy()
        counts += np.bincount(targets, minlength=len(counts))
    control = set(data.tokenizer.eos_token_ids) | set(data.tokenizer.prefix_ids)
    lengths = [0 if i in control else len(data.tokenizer.token_bytes(i)) for i in range(len(counts))]
    total = int(counts @ np.array(lengths, np.int64))
    return {"bytes": total, "bits_per_byte": loss * int(counts.sum()) / log(2) / total if total else None}


def _checkpoint(run: Path, step: int | None) -> Path:
    if step is None:
        return model_of_run(run)
    path = directory_of(run, step)
    if not complete(path):
        whole = [str(s) for s in steps_of(run) if complete(directory_of(run, s))]
        raise UsageError(f"{run} has no whole checkpoint of step {step} (there are: {', '.join(whole) or 'none'})")
    return path


def _seen(batches: Batches, stage: str, progress: Progress) -> Any:
    """Every batch of the split, once."""
    for index in range(batches.per_epoch):
        progress(stage, index, batches.per_epoch)
        batch: Batch = batches.batch(0, index)
        yield batch


def _translations(
    decoder: Decoder, data: Data, settings: Settings, figures: dict[str, Any], progress: Progress
) -> list[dict[str, Any]]:
    pairs, cut = pairs_of(data, settings.split, settings.limit)
    count = _Count("translating", len(pairs), progress)
    start = time.perf_counter()
    found: list[Translation] = translate(
        decoder,
        data.tokenizer,
        pairs,
        batch_tokens=settings.batch_tokens,
        max_new_tokens=settings.max_new_tokens,
        width=settings.width,
        advance=count,
    )
    seconds = time.perf_counter() - start
    figures["translation"] = {
        "strategy": "greedy" if settings.width == 1 else f"beams {settings.width}, pool, length penalty 1",
        "left_out": cut,
        "seconds": seconds,
        "tokens_per_s": sum(t.tokens for t in found) / seconds,
        "languages": scores(found, settings.tokenizers, settings.samples),
    }
    return [asdict(translation) for translation in found]


def _continuations(
    decoder: Decoder, data: Data, settings: Settings, figures: dict[str, Any], progress: Progress
) -> list[dict[str, Any]]:
    room = min(PROMPT_TOKENS, decoder.config.max_positions - REFERENCE_TOKENS)
    passages, documents = passages_of(data, settings.split, settings.limit, room) if room > 0 else ([], 0)
    if not passages:
        logger.warning(
            "none of %d documents is long enough to be continued: halves of %d and %d tokens are needed",
            documents,
            room,
            REFERENCE_TOKENS,
        )
        return []
    found, texts = continue_documents(
        decoder,
        data.tokenizer,
        passages,
        batch_tokens=settings.batch_tokens,
        samples=settings.samples,
        advance=_Count("continuing documents", len(passages), progress),
    )
    figures["continuations"] = {"strategy": "greedy", "prompt_tokens": room, **found}
    return list(texts)


def _no_texts(
    decoder: Decoder, data: Data, settings: Settings, figures: dict[str, Any], progress: Progress
) -> list[dict[str, Any]]:
    return []


# What a task is judged by beside its loss.
_TEXTS = {"translation": _translations, "language": _continuations, "chat": _no_texts}


class _Count:
    def __init__(self, stage: str, total: int, progress: Progress) -> None:
        self._stage, self._total, self._progress, self._done = stage, total, progress, 0
        progress(stage, 0, total)

    def __call__(self, count: int) -> None:
        self._done += count
        self._progress(self._stage, self._done, self._total)
