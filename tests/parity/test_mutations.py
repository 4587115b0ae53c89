"""Each switch, set wrongly, would be seen: the parity test cannot pass by luck."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.parity.forwards import plain
from tests.parity.mutations import mutations
from tests.parity.reference import Proved, distance

pytestmark = pytest.mark.slow

SEEN: dict[str, list[float]] = defaultdict(list)


@pytest.fixture(scope="module", autouse=True)
def print_mutations():
    """With -s: per fault, in how many configurations it was planted, and the least that it moved."""
    yield
    print()
    for name, moved in sorted(SEEN.items()):
        print(f"  {name:45s} {len(moved):3d} configurations, moves max |Δ log p| by {min(moved):.3f} at least")


def test_every_fault_moves_the_log_probabilities(proved: Proved):
    hidden = []
    planted = 0
    for fault in mutations(proved.config, proved.state):
        moved = distance(plain(fault.decoder(), proved.ids), proved.reference)
        SEEN[fault.name].append(moved)
        planted += 1
        if moved <= fault.least:
            hidden.append(f"{fault.name}: {moved:.2e}")
    assert not hidden
    assert planted >= 12
