"""What `plait.decoding` offers by name."""

from __future__ import annotations

import subprocess
import sys

import plait.decoding


def test_every_name_is_a_function_or_class_whatever_was_imported_before() -> None:
    for _ in range(2):
        for name in plait.decoding.__all__:
            assert callable(getattr(plait.decoding, name)), name


def test_the_package_alone_imports_no_torch() -> None:
    code = "import sys, plait.decoding; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
