"""Continuations of held-out documents by a language model, and how much they have of the documents' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.decoding.bleu import SAMPLES, bleu
from plait.decoding.generation import generate
from plait.decoding.metrics import Continuations, measure
from plait.decoding.scoring import batches_by_length, continuation_nll
from plait.model.decoder import Decoder
from plait.text.tokenizer import Tokenizer
from plait.training.data.build import Data
from plait.training.data.tokenizers import eos_id

PROMPT_TOKENS = 128
REFERENCE_TOKENS = 64


@dataclass(frozen=True)
class Passage:
    """The last tokens of a document's first half, and the first ones of its second."""

    prompt: list[int]
    reference: list[int]


def passages_of(
    data: Data,
    side: str,
    limit: int | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    reference_tokens: int = REFERENCE_TOKENS,
) -> tuple[list[Passage], int]:
    """Passages of a side's documents (all, or `limit` of them, evenly spaced), and how many documents there are.

    A document whose halves have fewer tokens than that is left out.
    """
    documents = [(store, i) for store in data.stores[side] for i in range(len(store))]
    found = []
    for store, i in documents:
        tokens = store.sequence(i)[0][:-1]  # without eos
        half = len(tokens) // 2
        if half >= prompt_tokens and len(tokens) - half >= reference_tokens:
            found.append(
                Passage(tokens[half - prompt_tokens : half].tolist(), tokens[half : half + reference_tokens].tolist())
            )
    if limit is not None and limit < len(found):
        found = [found[k * len(found) // limit] for k in range(limit)]
    return found, len(documents)


def continue_documents(
    decoder: Decoder,
    tokenizer: Tokenizer,
    passages: Sequence[Passage],
    *,
    batch_tokens: int,
    samples: int = SAMPLES,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Greedy continuations, as long as the references: figures, and the texts side by side.

    Figures: `metrics` of plait.decoding.metrics with their `formulas`, and `bleu` of the continuations' text against
    the references'.
    """
    new_tokens = len(passages[0].reference)
    tokens: list[list[int]] = [[] for _ in passages]
    ended = [False] * len(passages)
    start = time.perf_counter()
    for rows in batches_by_length([len(p.prompt) + new_tokens for p in passages], batch_tokens):
        found = generate(decoder, [passages[i].prompt for i in rows], new_tokens, eos_ids=[eos_id(tokenizer)])
        for i, row, end in zip(rows, found.tokens, found.ended, strict=True):
            tokens[i], ended[i] = row, end
        advance(len(rows))
    seconds = time.perf_counter() - start
    scored = continuation_nll(decoder, [p.prompt for p in passages], tokens, batch_tokens)
    measured = measure(Continuations(tokens, ended, float(scored.nll.sum()), int(scored.tokens.sum()), seconds))
    texts = [
        {
            "prompt": tokenizer.decode(passage.prompt),
            "continuation": tokenizer.decode(row),
            "reference": tokenizer.decode(passage.reference),
        }
        for passage, row in zip(passages, tokens, strict=True)
    ]
    score = bleu([t["continuation"] for t in texts], [t["reference"] for t in texts], samples=samples)
    figures = {
        "documents": len(passages),
        "metrics": {name: value for name, (value, _) in measured.items()},
        "formulas": {name: formula for name, (_, formula) in measured.items()},
        "bleu": score.to_json(),
    }
    return figures, texts
