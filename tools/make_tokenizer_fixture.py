"""Token ids of llama.cpp for a list of lines, as an oracle for plait's own tokenizers.

Runs in an environment of its own that has llama-cpp-python, not in plait's:

    python -m venv peer && peer/bin/pip install llama-cpp-python
    peer/bin/python tools/make_tokenizer_fixture.py MODEL.gguf tests/fixtures/tokenizer_lines.json.xz OUT.json.xz

The output is a JSON object: `parsed`, the ids of each line with special-token text parsed, and `plain`, the ids of
those lines whose ids differ when it is not, by line number. No BOS is added in either.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file; only its vocabulary is loaded")
    parser.add_argument("lines", type=Path, help="a JSON list of strings, xz-compressed")
    parser.add_argument("output", type=Path, help="where the ids go, xz-compressed JSON")
    arguments = parser.parse_args()

    from llama_cpp import Llama

    model = Llama(model_path=str(arguments.model), vocab_only=True, verbose=False)
    with lzma.open(arguments.lines, "rt", encoding="utf-8") as file:
        lines = json.load(file)

    def ids(line: str, special: bool) -> list[int]:
        return model.tokenize(line.encode("utf-8"), add_bos=False, special=special)

    parsed = [ids(line, True) for line in lines]
    plain = {number: ids(line, False) for number, line in enumerate(lines)}
    result = {"parsed": parsed, "plain": {number: row for number, row in plain.items() if row != parsed[number]}}
    with lzma.open(arguments.output, "wt", preset=9, encoding="utf-8") as file:
        json.dump(result, file, separators=(",", ":"))


if __name__ == "__main__":
    main()
