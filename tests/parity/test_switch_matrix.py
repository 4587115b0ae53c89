"""The parity cases cover the switches: each is on in one and off in another."""

from __future__ import annotations

from tests.parity.cases import CASES
from tests.parity.switches import distinct, table, vectors


def test_every_switch_is_on_in_one_case_and_off_in_another():
    found = vectors(CASES)
    all_vectors = [v for family in found.values() for v in family]
    print()
    for row in table(found):
        print(f"{row[0]:40s}" + "".join(f"{cell:>18s}" for cell in row[1:]))
    print(f"{len(CASES)} cases, {distinct(found)} distinct switch vectors")
    for name in all_vectors[0]:
        assert {v[name] for v in all_vectors} == {True, False}, name


def test_at_least_25_switch_vectors_are_distinct():
    assert distinct(vectors(CASES)) >= 25
