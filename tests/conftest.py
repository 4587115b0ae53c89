"""What holds for every test: the cache of packed weights is a directory of this run, never the user's."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    directory = tempfile.mkdtemp(prefix="plait-test-cache-")
    os.environ["PLAIT_CACHE"] = directory
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
