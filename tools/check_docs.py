"""Checks what the documentation promises: links lead somewhere, make targets exist, Python fences run.

Each fence marked `python` runs in a process of its own, in a scratch folder, with what the page's earlier
fences defined; `python no-run` is shown and not run. Exit status 1 names every fault with file and line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(?P<language>.*)$")
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#+\s+(?P<title>.*)$")
MAKE = re.compile(r"(?:^|`|\$ )make (?P<targets>[a-z-]+)", re.MULTILINE)
TIMEOUT_S = 300


@dataclass(frozen=True)
class Fence:
    line: int
    language: str
    code: str


def pages() -> list[Path]:
    """Every Markdown page of the project, reports and benchmark logs excepted."""
    return sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "reports" not in p.parts)])


def split_page(text: str) -> tuple[str, list[Fence]]:
    """The prose, its fences blanked so that line numbers stay, and the fences."""
    prose: list[str] = []
    fences: list[Fence] = []
    language: str | None = None
    start, code = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line.strip())
        if mark and language is None:
            language, start, code = mark["language"].strip(), number, []
        elif mark:
            fences.append(Fence(start, language or "", "\n".join(code)))
            language = None
        elif language is not None:
            code.append(line)
        prose.append("" if mark or language is not None else line)
    return "\n".join(prose), fences


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation dropped, spaces as hyphens."""
    titles = (mark["title"] for line in split_page(text)[0].splitlines() if (mark := HEADING.match(line)))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def link_faults(page: Path, prose: str) -> list[str]:
    faults = []
    for number, line in enumerate(prose.splitlines(), 1):
        for target in (link["target"] for link in LINK.finditer(re.sub(r"`[^`]*`", "", line))):
            if re.match(r"[a-z]+:", target):
                continue  # the web is not ours to check
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists():
                faults.append(f"{page.relative_to(ROOT)}:{number}: the link to {target} leads nowhere")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                faults.append(f"{page.relative_to(ROOT)}:{number}: {name or 'this page'} has no heading #{anchor}")
    return faults


def make_faults(page: Path, text: str) -> list[str]:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = {mark["targets"] for mark in MAKE.finditer(text)} - known
    return [f"{page.relative_to(ROOT)}: there is no `make {target}`" for target in sorted(wrong)]


def fence_faults(page: Path, fences: list[Fence]) -> list[str]:
    before = ""
    for fence in (f for f in fences if f.language == "python"):
        code = before + "\n" + fence.code
        with tempfile.TemporaryDirectory() as scratch:
            path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=scratch,
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return [f"{page.relative_to(ROOT)}:{fence.line}: the Python fence fails: {said}"]
        before = code
    return []


def main() -> int:
    faults: list[str] = []
    ran = 0
    for page in pages():
        text = page.read_text()
        prose, fences = split_page(text)
        faults += link_faults(page, prose) + make_faults(page, text) + fence_faults(page, fences)
        ran += sum(fence.language == "python" for fence in fences)
    print("\n".join(faults) if faults else f"documentation: {len(pages())} pages, {ran} Python fences run, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
