"""Imports point one way. A folder may import those below it, and nothing above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "plait"

# From the bottom up; folders in one row may import one another.
ROWS: list[set[str]] = [
    {"errors", "jsonfile", "cachefile", "patterns"},
    {"ops"},
    {"kernels"},
    {"memory"},
    {"model"},
    {"weights", "text"},
    {"decoding"},
    {"plan"},
    {"engine"},
    {"training"},
    {"verify", "bench"},
    {"server"},
    {"studies"},
    {"cli"},
]
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}

# A method that users of this ecosystem expect on the model, carried out by the layer above it.
ALLOWED = {("model/decoder.py", "weights")}


def imports() -> list[tuple[str, str]]:
    """(file, folder or module of plait that it imports), imports inside functions included."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module] if node.module != "plait" else [f"plait.{a.name}" for a in node.names]
            found += [
                (str(path.relative_to(SOURCE)), name.split(".")[1]) for name in names if name.startswith("plait.")
            ]
    return found


def test_every_folder_has_its_place() -> None:
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert folders <= set(RANK)


@pytest.mark.parametrize(("file", "target"), sorted(set(imports())))
def test_an_import_points_down(file: str, target: str) -> None:
    if "/" not in file or (file, target) in ALLOWED or target == "__version__":
        return  # the package's own table of names, and the one exception
    folder = file.split("/")[0]
    assert RANK[target] <= RANK[folder], f"{file} imports plait.{target}, which stands above {folder}"
