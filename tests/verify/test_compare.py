"""The figures of a comparison, on logits small enough to work out by hand."""

from __future__ import annotations

from math import log

import pytest
import torch

from plait.verify.compare import Comparison, GreedyComparison, compare_logits, first_near_tie
from plait.verify.prompts import Prompt, built_in_prompts, long_enough, unreached_windows
from plait.verify.report import Verification, greedy_cell, verdict
from tests.memory.tiny_decoders import tiny_decoder


def compared(ours: list[list[float]], reference: list[list[float]], tolerance: float = 1e-4) -> Comparison:
    ids = list(range(len(ours)))
    return compare_logits(Prompt("p", ids), ids, torch.tensor(ours), torch.tensor(reference), tolerance)


def test_the_deviation_is_the_largest_over_the_vocabulary_of_the_log_probabilities():
    # p = (1/2, 1/2) against p = (3/4, 1/4): |log 2/3| and |log 2|.
    result = compared([[0.0, 0.0]], [[log(3), 0.0]])
    assert result.deltas == pytest.approx([log(2)])
    assert result.mean_delta == pytest.approx((log(2) + log(3 / 2)) / 2)


def test_a_constant_added_to_all_logits_is_no_deviation():
    assert compared([[1.0, 2.0]], [[5.0, 6.0]]).deltas == pytest.approx([0.0], abs=1e-6)


def test_the_tolerance_grows_with_logits_above_10():
    assert compared([[0.0, 9.0]], [[0.0, 9.0]]).tolerance == pytest.approx(1e-4)
    assert compared([[0.0, -30.0]], [[0.0, -30.0]]).tolerance == pytest.approx(3e-4)


def test_worst_and_first_wrong_position_and_top1():
    right = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    result = compared([[0.0, 1.0], [0.0, 1.1], [2.0, 1.0], [0.0, 1.0]], right)
    assert (result.first_wrong, result.worst, result.top1) == (1, 2, 0.75)
    assert not result.passed


def test_logits_that_are_no_numbers_are_wrong_where_they_begin():
    result = compared([[0.0, 1.0], [float("nan"), 1.0], [9.0, 1.0]], [[0.0, 1.0]] * 3)
    assert (result.first_wrong, result.worst, result.passed) == (1, 1, False)


def test_positions_are_compared_in_slices_without_a_seam():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(150, 7, generator=generator) for _ in range(2))
    ids = list(range(150))
    whole = (a.log_softmax(-1) - b.log_softmax(-1)).abs().amax(-1)
    assert compare_logits(Prompt("p", ids), ids, a, b, 1.0).deltas == pytest.approx(whole.tolist())


def test_a_near_tie_is_the_first_row_whose_two_best_lie_together():
    rows = torch.tensor([[0.0, 5.0, 1.0], [3.0, 3.00001, 0.0], [0.0, 0.0, 0.0]])
    assert first_near_tie(rows, 1e-4) == 1
    assert first_near_tie(rows[:1], 1e-4) == 1  # none: the number of rows


def test_texts_may_part_from_a_near_tie_on_and_not_before():
    assert GreedyComparison([1, 2, 3], [1, 2, 3], 3).passed
    assert GreedyComparison([1, 2, 3], [1, 9, 3], 1).passed
    early = GreedyComparison([1, 2, 3], [1, 9, 3], 2)
    assert (early.divergence, early.passed) == (1, False)
    assert greedy_cell(early) == "differs at 1"
    assert greedy_cell(GreedyComparison([1, 2], [1, 2], 2)) == "2 tokens equal"
    assert greedy_cell(None) == "-"


def test_the_verdict_names_prompt_position_and_amount():
    bad = compared([[0.0, 1.0], [0.0, 3.0]], [[0.0, 1.0]] * 2)
    bad.greedy = GreedyComparison([4, 5], [4, 6], 2)
    good = compared([[0.0, 1.0]], [[0.0, 1.0]])
    lines = verdict(Verification("m", "r", "float32", [good, bad]))
    assert lines[0] == "DIFFER: 1 of 2 prompts (3 positions)"
    assert "position 1 (after token 1) is the first of 1 beyond" in lines[1]
    assert "part at token 1: 5 in the reference, 6 here" in lines[1]
    assert verdict(Verification("m", "r", "float32", [good]))[0].startswith("AGREE: 1 positions in 1 prompts")


def test_the_long_prompt_reaches_past_every_window_of_bearable_length():
    config = tiny_decoder("mistral", sliding_window=500, max_position_embeddings=2000).config
    prompts = built_in_prompts(None, config, None)
    assert long_enough(config) == 564 == len(prompts[-1].token_ids)
    assert unreached_windows(config, prompts) == []
    assert unreached_windows(config, prompts[:2]) == [500]


def test_prompts_leave_room_for_a_token_in_a_short_context():
    prompts = built_in_prompts(None, tiny_decoder("llama", max_position_embeddings=20).config, 100)
    assert max(len(p.token_ids) for p in prompts) == 19
