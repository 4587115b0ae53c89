"""Write docs/switch-matrix.md: which switches the parity cases of each family have on.

Run it after tests/parity/cases.py has changed: `python tools/write_switch_matrix.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADER = """# Families and switches

Written by `tools/write_switch_matrix.py` from the parity cases in `tests/parity/cases.py`. A number says in how many
of a family's configurations a switch is on. Each configuration gives transformers' log-probabilities (plait_gpt, which
has no class there, those of a plain torch model in the tests), plain, dense, paged and replayed from a recording, and
`tests/parity/test_mutations.py` shows that a wrong switch would be seen.

"""


def document() -> str:
    """The page as Markdown."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    from tests.parity.cases import CASES
    from tests.parity.switches import distinct, table, vectors

    found = vectors(CASES)
    head, *rows = table(found)
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    lines += ["", f"{len(CASES)} configurations, {distinct(found)} distinct switch vectors:", ""]
    lines += [f"- {case}" for case in CASES]
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = ROOT / "docs" / "switch-matrix.md"
    target.write_text(document(), encoding="utf-8")
    print(target)
