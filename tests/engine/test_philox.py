"""Philox4x32-10 against the known answers of its authors, and how the draws are keyed."""

from __future__ import annotations

import numpy as np
import pytest

from plait.engine.philox import philox4x32, uniforms

ONES = 0xFFFFFFFF
# counter, key, answer: from the Random123 distribution's table of known answers
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert list(philox4x32(*counter, *key)) == answer
    arrays = philox4x32(*(np.full(3, word, np.uint64) for word in counter + key))
    assert [a.tolist() for a in arrays] == [[word] * 3 for word in answer]


def test_rows_are_independent_of_one_another() -> None:
    seeds = [1, 2**63 + 5, 1] + list(range(20))
    choices, positions = [0, 3, 1] + [2] * 20, [0, 7, 0] + list(range(20))
    together = uniforms(seeds, choices, positions)
    for i in range(len(seeds)):
        alone = uniforms(seeds[i : i + 1], choices[i : i + 1], positions[i : i + 1])
        assert np.array_equal(together[i], alone[0])
    assert len(np.unique(together)) == together.size
    assert ((together >= 0) & (together < 1)).all()


def test_a_number_is_the_top_53_bits_of_two_words() -> None:
    # seed 0, choice 0, position 0 is the first known answer
    assert uniforms([0], [0], [0])[0].tolist() == [
        (0x6627E8D5E169C58D >> 11) / 2**53,
        (0xBC57AC4C9B00DBD8 >> 11) / 2**53,
    ]


def test_draws_are_uniform() -> None:
    n = 100_000
    u = uniforms([9] * n, [0] * n, range(n))
    # the mean of n uniforms has standard deviation 1 / sqrt(12 n)
    assert np.abs(u.mean(axis=0) - 0.5).max() < 5 / np.sqrt(12 * n)
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 5 / np.sqrt(n)
