"""One reference model per case for the whole session; transformers is imported once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.parity.cases import CASES, Case
from tests.parity.reference import Proved, prove


@pytest.fixture(scope="session")
def proved_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Proved]:
    made: dict[Case, Proved] = {}

    def get(case: Case) -> Proved:
        key = str(case)
        if key not in made:
            made[key] = prove(case, tmp_path_factory.mktemp("model"))
        return made[key]

    return get


@pytest.fixture(params=CASES, ids=str)
def proved(request: pytest.FixtureRequest, proved_cases: Callable[[Case], Proved]) -> Proved:
    return proved_cases(request.param)


@pytest.fixture(autouse=True)
def one_thread():
    """These models are so small that threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
