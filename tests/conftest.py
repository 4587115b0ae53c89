"""What holds for every test: the cache of packed weights is a directory of this run, never the user's; and torch's
threads sleep while they wait for one another."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

# A model that is loaded without `threads` lets torch take every CPU. Where another process has one of them, threads
# that spin wait for a time slice at every operation, and a tiny model takes several times as long. Read when torch is
# loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    directory = tempfile.mkdtemp(prefix="plait-test-cache-")
    os.environ["PLAIT_CACHE"] = directory
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
