"""Servers that the tests share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import Server, running
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny model whose random weights give varied text; a context that is long enough to be interrupted."""
    return tiny_model_dir(tmp_path_factory.mktemp("served"), max_position_embeddings=8192)


@pytest.fixture(scope="session")
def server(model_dir) -> Iterator[Server]:
    with running(str(model_dir), "--served-model-name", "tiny", "--dtype", "fp32", "--max-num-seqs", "32") as server:
        yield server
