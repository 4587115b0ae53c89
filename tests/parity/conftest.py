"""One reference model per case for the whole session; transformers is imported once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.cases import CASES, Case
from tests.parity.reference import Proved, prove
from tests.threads import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers():
    """Its warnings on scaling factors of made-up sizes, and its progress bars, would bury what the tests print."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)


@pytest.fixture(scope="session")
def proved_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Proved]:
    made: dict[Case, Proved] = {}

    def get(case: Case) -> Proved:
        key = str(case)
        if key not in made:
            made[key] = prove(case, tmp_path_factory.mktemp("model"))
        return made[key]

    return get


# `make test-fast` proves the first case of every family.
FIRST = {case.family: str(case) for case in reversed(CASES)}.values()
EVERY_CASE = [case if str(case) in FIRST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.fixture(params=EVERY_CASE, ids=str)
def proved(request: pytest.FixtureRequest, proved_cases: Callable[[Case], Proved]) -> Proved:
    return proved_cases(request.param)


@pytest.fixture(autouse=True)
def small_models(one_thread):
    """All models here are tiny."""
