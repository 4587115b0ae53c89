"""Beam search against exhaustive search, a plain implementation, transformers, greedy, and rows alone."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.decoding.beam import Beams, beam_search
from plait.decoding.generation import generate, left_padded
from plait.errors import RequestError
from tests.decoding.models import RAGGED, Recomputing, model_pair
from tests.memory.tiny_decoders import tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")

PENALTIES = [0.0, 0.7, 1.0, 2.0, -1.0]


class Prefixes:
    """A `StepModel` whose next distribution is random, and a function of the tokens so far."""

    max_positions = None
    device = torch.device("cpu")

    def __init__(self, vocabulary: int, seed: int = 0, spread: float = 1.5) -> None:
        self.vocabulary, self.seed, self.spread = vocabulary, seed, spread
        self.rows_fed: list[int] = []

    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        number = self.seed
        for token in tokens:
            number = (number * 1_000_003 + token + 7) % (1 << 31)
        return torch.randn(self.vocabulary, generator=torch.Generator().manual_seed(number)) * self.spread

    def start(self, reach: torch.Tensor) -> list[tuple[int, ...]]:
        return [()] * len(reach)

    def forward(self, ids, mask, positions, past):
        self.rows_fed.append(len(ids))
        columns = mask[:, -ids.shape[1] :]
        past = [before + tuple(row[seen].tolist()) for before, row, seen in zip(past, ids, columns, strict=True)]
        return torch.stack([self.logits(tokens) for tokens in past]), past

    def select(self, past, rows):
        return [past[i] for i in rows.tolist()]

    def log_p(self, tokens: tuple[int, ...]) -> list[float]:
        return self.logits(tokens).double().log_softmax(-1).tolist()


def exhaustive(model: Prefixes, prompt: list[int], length: int, ends: list[int], penalty: float) -> list[Any]:
    """(score, tokens with the end token) of every sequence that ends or is as long as it may be, best first."""
    found = {}
    for tokens in product(range(model.vocabulary), repeat=length):
        cut = next((i + 1 for i, token in enumerate(tokens) if token in ends), length)
        tokens = tokens[:cut]
        if tokens not in found:
            total = sum(model.log_p((*prompt, *tokens[:i]))[token] for i, token in enumerate(tokens))
            found[tokens] = total / len(tokens) ** penalty
    return sorted(((score, tokens) for tokens, score in found.items()), reverse=True)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("semantics", ["pool", "frozen"])
@pytest.mark.parametrize("ends", [[], [1], [0, 3]])
def test_full_width_is_exhaustive_search(penalty: float, semantics: Any, ends: list[int]) -> None:
    """Wider than the vocabulary, and wider than there are sequences."""
    model = Prefixes(4, seed=3)
    expected = exhaustive(model, [2, 1], 3, ends, penalty)
    found = beam_search(model, [[2, 1]], 3, Beams(64, penalty, semantics=semantics), eos_ids=ends)[0]
    assert len(found) == len(expected)
    for hypothesis, (score, tokens) in zip(found, expected, strict=True):
        assert hypothesis.ended == (tokens[-1] in ends)
        assert hypothesis.tokens == list(tokens[: len(tokens) - hypothesis.ended])
        assert hypothesis.score == pytest.approx(score, abs=1e-5)


def plain_pool(
    model: Prefixes, prompt: list[int], length: int, ends: list[int], beams: Beams
) -> list[tuple[float, tuple[int, ...]]]:
    """The rule of `pool` with lists of Python, one row, in float64."""
    width, penalty = beams.width, beams.length_penalty
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for step in range(1, length + 1):
        candidates = sorted(
            (
                (total + p, (*tokens, token))
                for total, tokens in running
                for token, p in enumerate(model.log_p((*prompt, *tokens)))
            ),
            reverse=True,
        )[: max(2, 1 + len(ends)) * width]
        finished = [(t / step**penalty, s) for t, s in candidates[:width] if s[-1] in ends or step == length]
        pool = sorted([*pool, *finished], reverse=True)[:width]
        running = [(t, s) for t, s in candidates if s[-1] not in ends][:width]
        if len(pool) == width:
            favourable = length if beams.early_stopping == "never" and penalty > 0 else step
            if beams.early_stopping is True or running[0][0] / favourable**penalty <= pool[-1][0]:
                break
    return pool


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_the_pool_follows_its_rule(penalty: float, early_stopping: Any, width: int) -> None:
    beams = Beams(width, penalty, early_stopping)
    for seed in range(4):
        model = Prefixes(7, seed, spread=1.0)
        found = beam_search(model, [[2, 1]], 7, beams, eos_ids=[1, 4])[0]
        expected = plain_pool(model, [2, 1], 7, [1, 4], beams)
        assert [h.tokens for h in found] == [[t for t in tokens if t not in (1, 4)] for _, tokens in expected]
        assert [h.score for h in found] == pytest.approx([score for score, _ in expected], abs=1e-5)


def plain_frozen(model: Prefixes, prompt: list[int], length: int, ends: list[int], beams: Beams) -> list[Any]:
    """The rule of `frozen` with lists of Python, one row, in float64."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        candidates = []
        for total, tokens in running:
            if tokens and tokens[-1] in ends:
                candidates.append((total, tokens))
            else:
                candidates += [(total + p, (*tokens, t)) for t, p in enumerate(model.log_p((*prompt, *tokens)))]
        running = sorted(candidates, reverse=True)[: beams.width]
    return sorted(((total / len(tokens) ** beams.length_penalty, tokens) for total, tokens in running), reverse=True)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("width", [1, 2, 3, 9])
def test_frozen_beams_keep_their_place(penalty: float, width: int) -> None:
    beams = Beams(width, penalty, semantics="frozen")
    for seed in range(4):
        model = Prefixes(7, seed, spread=1.0)
        found = beam_search(model, [[2, 1]], 6, beams, eos_ids=[1, 4])[0]
        expected = plain_frozen(model, [2, 1], 6, [1, 4], beams)
        assert [h.tokens for h in found] == [[t for t in tokens if t not in (1, 4)] for _, tokens in expected]
        assert [h.score for h in found] == pytest.approx([score for score, _ in expected], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_sequences_and_scores_are_those_of_transformers(family: str, early_stopping: Any, tmp_path: Path) -> None:
    decoder, theirs = model_pair(family, tmp_path)
    ids, mask = left_padded(RAGGED, 0)
    common = generate(decoder, RAGGED, 12).ids.flatten().tolist()
    compared = 0
    for ends in ([], [common[4]], [common[4], common[20], common[40]]):
        for width in (2, 3, 5):
            for penalty in PENALTIES:
                out = theirs.generate(
                    input_ids=ids, attention_mask=mask.long(), max_new_tokens=10, do_sample=False, num_beams=width,
                    num_return_sequences=width, length_penalty=penalty, early_stopping=early_stopping,
                    eos_token_id=ends or None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
                )  # fmt: skip
                found = beam_search(decoder, RAGGED, 10, Beams(width, penalty, early_stopping), eos_ids=ends)
                sequences = out.sequences[:, ids.shape[1] :].unflatten(0, (len(RAGGED), width)).tolist()
                scores = out.sequences_scores.unflatten(0, (len(RAGGED), width)).tolist()
                for row, hypotheses in enumerate(found):
                    there = [k for k in range(width) if scores[row][k] > -1e8]
                    assert [h.score for h in hypotheses] == pytest.approx([scores[row][k] for k in there], abs=1e-4)
                    for k, hypothesis in zip(there, hypotheses, strict=True):
                        cut = next((i for i, t in enumerate(sequences[row][k]) if t in ends), 10)
                        assert hypothesis.tokens == sequences[row][k][:cut]
                        assert hypothesis.ended == (cut < 10)
                        compared += 1
    assert compared > 3 * 3 * 5 * len(RAGGED)


@pytest.mark.parametrize("semantics", ["pool", "frozen"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_row_alone_is_the_row_in_a_ragged_batch_and_recomputing_changes_nothing(family: str, semantics: Any) -> None:
    decoder = tiny_decoder(family)
    ends = [generate(decoder, RAGGED, 3).ids[0, 2].item(), 5]
    beams = Beams(3, semantics=semantics)
    together = beam_search(decoder, RAGGED, 9, beams, eos_ids=ends)
    alone = [beam_search(decoder, [prompt], 9, beams, eos_ids=ends)[0] for prompt in RAGGED]
    again = beam_search(Recomputing(decoder), RAGGED, 9, beams, eos_ids=ends)
    for first, second, third in zip(together, alone, again, strict=True):
        assert [h.tokens for h in first] == [h.tokens for h in second] == [h.tokens for h in third]
        assert [h.score for h in first] == pytest.approx([h.score for h in second], abs=1e-4)


@pytest.mark.parametrize("semantics", ["pool", "frozen"])
def test_one_beam_is_greedy(semantics: Any) -> None:
    decoder = tiny_decoder("qwen3")
    ends = [generate(decoder, RAGGED, 5).ids[1, 4].item()]
    greedy = generate(decoder, RAGGED, 12, eos_ids=ends)
    found = beam_search(decoder, RAGGED, 12, Beams(1, semantics=semantics), eos_ids=ends)
    assert [row[0].tokens for row in found] == greedy.tokens
    assert [row[0].ended for row in found] == greedy.ended and any(greedy.ended)


class Script(Prefixes):
    """Given probabilities after given tokens, uniform elsewhere."""

    def __init__(self, table: dict[tuple[int, ...], list[float]], vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.table = table

    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(self.table.get(tokens, [1 / self.vocabulary] * self.vocabulary)).log()


def test_the_prompt_takes_no_part_in_the_length() -> None:
    """After 100 tokens: A ends at once, log .4 over 1 token; B takes two more, log .6 + log .8 over 2. Divided by 1 and
    by 2, -.916 is worse than -.367; divided by 101 and 102 the order of the sums, -.916 and -.734, would be the same,
    so the score tells."""
    prompt = [2] * 100
    table = {tuple(prompt): [0.4, 0.6, 0.0], (*prompt, 1): [0.8, 0.1, 0.1]}
    found = beam_search(Script(table, 3), [prompt], 2, Beams(2), eos_ids=[0])[0]
    assert (found[0].tokens, found[0].ended) == ([1], True)
    assert found[0].score == pytest.approx((math.log(0.6) + math.log(0.8)) / 2)
    assert found[1].score == pytest.approx(math.log(0.4))


def test_an_end_token_may_come_first() -> None:
    table = {(5,): [0.9, 0.05, 0.05], (5, 1): [0.1, 0.45, 0.45], (5, 2): [0.1, 0.45, 0.45]}
    for semantics in ("pool", "frozen"):
        found = beam_search(Script(table, 3), [[5]], 3, Beams(2, semantics=semantics), eos_ids=[0])[0]
        assert (found[0].tokens, found[0].ended) == ([], True)
        assert found[0].score == pytest.approx(math.log(0.9))


def test_the_prompt_is_computed_once() -> None:
    model = Prefixes(7)
    beam_search(model, [[1, 2, 3], [4]], 4, Beams(3))
    assert model.rows_fed == [2, 6, 6, 6]


def test_bad_requests_name_the_field() -> None:
    for field, beams in {
        "width": {"width": 0},
        "length_penalty": {"width": 2, "length_penalty": math.nan},
        "early_stopping": {"width": 2, "early_stopping": "maybe"},
        "semantics": {"width": 2, "semantics": "lake"},
    }.items():
        with pytest.raises(RequestError, match=field) as error:
            Beams(**beams)
        assert error.value.field == field
    with pytest.raises(RequestError, match="frozen beams stop when all have ended"):
        Beams(2, early_stopping=True, semantics="frozen")
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        beam_search(Prefixes(3), [[]], 3, Beams(2))
