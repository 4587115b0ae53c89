"""The pages of docs/learn do what they say: their fences run in order, and print what the fence below them shows."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

from tools.check_docs import LINK, split_page
from tools.make_figures import FIGURES, draw

ROOT = Path(__file__).parents[1]
LEARN = ROOT / "docs" / "learn"
PAGES = sorted(LEARN.glob("*.md"))
NUMBER = re.compile(r"(?<![\w#.])-?\d+(?:\.\d+)?(?![\w.])")
# What each page is for; a page that is not here would be one that nobody has asked for.
NAMES = {"batches.md", "latent.md", "rope.md", "routers.md", "windows.md"}


def test_the_pages_are_there():
    assert {page.name for page in PAGES} >= NAMES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_fence_of_a_page_runs_and_prints_what_is_shown(page: Path):
    """One namespace per page. A `text` fence right after a `python` one is what that prints, to the letter."""
    fences = split_page(page.read_text())[1]
    namespace: dict[str, object] = {"__name__": page.stem}
    ran = 0
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence.language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * fence.line + fence.code, str(page), "exec"), namespace)
        if following is not None and following.language == "text":
            assert printed.getvalue().rstrip() == following.code.rstrip(), f"{page.name}:{fence.line}"
        else:
            assert not printed.getvalue(), f"{page.name}:{fence.line} prints what the page does not show"
        ran += 1
    assert ran >= 2


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib (the docs extra) is missing")
def test_figures_are_those_that_the_script_draws(tmp_path: Path):
    draw(tmp_path)
    for name in FIGURES:
        drawn, kept = ((folder / name).read_text() for folder in (tmp_path, LEARN))
        remedy = f"run tools/make_figures.py: {name}"
        assert NUMBER.sub("0", drawn) == NUMBER.sub("0", kept), remedy
        # Coordinates are logarithms and powers, whose last digit depends on the processor.
        assert [float(x) for x in NUMBER.findall(drawn)] == pytest.approx(
            [float(x) for x in NUMBER.findall(kept)], abs=2e-6, rel=1e-6
        ), remedy


def test_every_figure_stands_on_a_page():
    shown = {link["target"] for page in PAGES for link in LINK.finditer(page.read_text())}
    assert set(FIGURES) <= shown
