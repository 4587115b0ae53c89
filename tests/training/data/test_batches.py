"""Batches by token budget: what stands in them, and that they follow from (seed, epoch, index) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.training.data.batches import Batches
from plait.training.data.examples import Joined, Packed, Sequences, TokenStore, Windows
from plait.training.data.order import members_of_epoch, permutation


def store(
    *sequences: list[int], learnt: list[list[int]] | None = None, languages: list[int] | None = None
) -> TokenStore:
    flat = np.array([token for sequence in sequences for token in sequence], np.uint32)
    marks = None if learnt is None else np.array([mark for row in learnt for mark in row], np.uint8)
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    return TokenStore(flat, offsets, marks, None if languages is None else np.array(languages, np.int64))


def of_lengths(lengths: list[int]) -> Sequences:
    """Sequences of so many positions; each token tells its sequence."""
    return Sequences(store(*([number + 3] * (length + 1) for number, length in enumerate(lengths))))


def test_the_worked_example_of_translation() -> None:
    pair = store([3, 10, 11, 2, 20, 21, 1], learnt=[[0, 0, 0, 0, 1, 1, 1]], languages=[0])
    batch = Batches(Joined([Sequences(pair, roles=True)], [1.0]), 64, pad_id=0).at(0)
    assert batch.ids.tolist() == [[3, 10, 11, 2, 20, 21]]
    assert batch.targets.tolist() == [[-100, -100, -100, 20, 21, 1]]
    assert batch.roles is not None and batch.roles.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert batch.languages is not None and batch.languages.tolist() == [0]
    assert (batch.tokens, batch.target_count) == (6, 3)


def test_padding_goes_by_length_and_not_by_id() -> None:
    # pad = eos = 1: the eos that ends the shorter sequence is a target, and the padding behind it is none.
    examples = Joined([Sequences(store([5, 6, 7, 1], [8, 1]))], [1.0])
    batch = Batches(examples, 64, pad_id=1, shuffle=False).batch(0, 0)
    assert batch.ids.tolist() == [[8, 1, 1], [5, 6, 7]]
    assert batch.targets.tolist() == [[1, -100, -100], [6, 7, 1]]
    assert batch.token_mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.padding_share == pytest.approx(2 / 6)


def test_windows_share_their_border_and_lose_no_token() -> None:
    windows = Windows(store([10, 11, 12, 1], [13, 14, 1]), 3)
    # The stream is 10 11 12 1 13 14 1; window i is its tokens 3i .. 3i + 3.
    assert [windows[i].ids.tolist() for i in range(len(windows))] == [[10, 11, 12], [1, 13, 14]]
    assert [windows[i].targets.tolist() for i in range(len(windows))] == [[11, 12, 1], [13, 14, 1]]
    longer = Windows(store([10, 11, 12, 1], [13, 14, 15, 1]), 3)
    assert (longer[2].ids.tolist(), longer[2].targets.tolist(), longer.lengths.tolist()) == ([15], [1], [3, 3, 1])


def test_documents_apart_begin_anew() -> None:
    windows = Windows(store([10, 11, 12, 1], [13, 14, 1], [15, 1]), 5, apart=True)
    first, second = windows[0], windows[1]
    assert first.ids.tolist() == [10, 11, 12, 1, 13]
    assert first.targets.tolist() == [11, 12, 1, -100, 14]
    assert first.segment_ids is not None and first.segment_ids.tolist() == [0, 0, 0, 0, 1]
    assert first.positions is not None and first.positions.tolist() == [0, 1, 2, 3, 0]
    assert second.ids.tolist() == [14, 1, 15]
    assert second.targets.tolist() == [1, -100, 1]
    assert second.segment_ids is not None and second.segment_ids.tolist() == [0, 0, 1]
    assert second.positions is not None and second.positions.tolist() == [0, 1, 0]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 9), st.booleans())
def test_every_token_but_the_first_is_a_target_once(documents: list[int], window: int, apart: bool) -> None:
    stream = list(range(100, 100 + sum(documents)))
    ends = np.cumsum(documents)
    parts = [stream[end - size : end] for size, end in zip(documents, ends.tolist(), strict=True)]
    windows = Windows(store(*parts), window, apart)
    targets = [t for i in range(len(windows)) for t in windows[i].targets.tolist() if t != -100]
    firsts = {part[0] for part in parts} if apart else {stream[0]}
    assert targets == [token for token in stream if token not in firsts]
    assert [len(windows[i].ids) for i in range(len(windows))] == windows.lengths.tolist()


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 200), st.integers(0, 3), st.integers(0, 2)
)
def test_an_epoch_has_every_example_once_within_the_budget(
    lengths: list[int], budget: int, seed: int, epoch: int
) -> None:
    batches = Batches(Joined([of_lengths(lengths)], [1.0]), budget, seed, pad_id=0)
    seen, positions, tokens = [], 0, 0
    for index in range(batches.count(epoch)):
        batch = batches.batch(epoch, index)
        assert batch.ids.numel() <= budget
        positions, tokens = positions + batch.ids.numel(), tokens + batch.tokens
        seen += (batch.ids[:, 0] - 3).tolist()
        assert batch.token_mask.sum(-1).tolist() == [lengths[member] for member in batches.members(epoch, index)]
    assert sorted(seen) == list(range(len(lengths)))
    assert batches.padding_share(epoch) == pytest.approx(1 - tokens / positions)
    assert tokens == batches.tokens(epoch) == sum(lengths)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(0, 5), st.lists(st.integers(0, 20), max_size=6)
)
def test_a_batch_follows_from_its_number_alone(lengths: list[int], seed: int, numbers: list[int]) -> None:
    examples = Joined([of_lengths(lengths)], [1.0])
    straight = Batches(examples, 64, seed, pad_id=0)
    expected = [straight.at(number) for number in range(21)]
    asked = Batches(examples, 64, seed, pad_id=0)
    for number in numbers:
        assert torch.equal(asked.at(number).ids, expected[number].ids)
        assert torch.equal(Batches(examples, 64, seed, pad_id=0).at(number).targets, expected[number].targets)


def test_epochs_and_seeds_differ() -> None:
    examples = Joined([of_lengths([4] * 64)], [1.0])
    orders = {
        (seed, epoch): tuple(Batches(examples, 16, seed, pad_id=0).members(epoch, 0))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_a_permutation_has_every_number_once(count: int) -> None:
    assert sorted(permutation(count, 3, 4).tolist()) == list(range(count))


def test_a_permutation_favours_no_place() -> None:
    # 10 numbers, 4000 orders: each place holds number 0 about 400 times; 6 deviations, sqrt(4000 * 0.1 * 0.9), are 114.
    places = np.bincount([permutation(10, 0, epoch).tolist().index(0) for epoch in range(4000)], minlength=10)
    assert np.abs(places - 400).max() < 114


def test_weights_take_sources_more_or_less_often() -> None:
    starts = np.array([0, 10, 14])
    counts = np.zeros(14, int)
    for epoch in range(4):
        members = members_of_epoch(starts, [0.5, 2.25], 7, epoch)
        assert len(members) == 5 + 9
        counts += np.bincount(members, minlength=14)
    # Over four epochs 4 * 0.5 = 2 times each, and 4 * 2.25 = 9.
    assert counts.tolist() == [2] * 10 + [9] * 4


def test_ranks_share_the_batches_and_stay_in_step() -> None:
    examples = Joined([of_lengths([3, 3, 3, 3, 3])], [1.0])
    one = Batches(examples, 3, 1, pad_id=0)
    two = [Batches(examples, 3, 1, pad_id=0, rank=rank, world=2) for rank in (0, 1)]
    assert (one.per_epoch, two[0].per_epoch, two[1].per_epoch) == (5, 3, 3)
    for index in range(5):
        assert two[index % 2].members(0, index // 2) == one.members(0, index)
    rest = two[1].batch(0, 2)
    assert (rest.ids.shape, rest.tokens, rest.target_count) == ((1, 1), 0, 0)


def test_evaluation_is_in_order_and_sees_each_example_once() -> None:
    examples = Joined([of_lengths([5, 2, 9]), of_lengths([1])], [0.5, 3.0])
    batches = Batches(examples, 10, pad_id=0, shuffle=False)
    assert [batches.members(epoch, index) for epoch in (0, 1) for index in range(batches.per_epoch)] == [
        [3, 1], [0], [2], [3, 1], [0], [2],
    ]  # fmt: skip


def test_an_example_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(UsageError, match=r"16 tokens has no room for the longest example \(20\): raise"):
        Batches(Joined([of_lengths([20, 3])], [1.0]), 16, pad_id=0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_packing_keeps_every_example_whole(lengths: list[int]) -> None:
    examples = of_lengths(lengths)
    packed = Packed(examples, 20)
    seen: list[int] = []
    for index in range(len(packed)):
        row = packed[index]
        assert len(row.ids) == packed.lengths[index] <= 20
        assert row.segment_ids is not None and row.positions is not None
        for segment in range(int(row.segment_ids[-1]) + 1):
            inside = row.segment_ids == segment
            member = int(row.ids[inside][0]) - 3
            assert row.ids[inside].tolist() == examples[member].ids.tolist()
            assert row.targets[inside].tolist() == examples[member].targets.tolist()
            assert row.positions[inside].tolist() == list(range(lengths[member]))
            seen.append(member)
    assert sorted(seen) == list(range(len(lengths)))
    # Best fit leaves at most one row less than half full.
    assert sum(length <= 10 for length in packed.lengths) <= 1


def test_rows_of_a_batch_leave_out_padding_that_all_have() -> None:
    batch = Batches(Joined([of_lengths([5, 2, 2])], [1.0]), 20, pad_id=0, shuffle=False).batch(0, 0)
    assert batch.rows(0, 2).ids.shape == (2, 2)
    assert batch.rows(0, 2).targets.tolist() == batch.targets[:2, :2].tolist()
