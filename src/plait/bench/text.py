"""Token ids of real prose: what every measurement is fed with, the same ids on all sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.errors import UsageError

# Two chapters' beginnings, from Moby-Dick (1851) and Emma (1815): public domain.
PROSE = Path(__file__).with_name("prose.txt")


def load_text_ids(model: Any, file: str | Path | None = None) -> tuple[list[int], list[int]]:
    """(ids of the text without BOS, what a prompt begins with) for the tokenizer of a model.

    file: UTF-8 text; default the prose in this package. Raises UsageError where it cannot be read.
    """
    from plait.text.tokenizer import load_tokenizer
    from plait.weights.locate import locate

    tokenizer = load_tokenizer(locate(model))
    try:
        text = Path(file or PROSE).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text (byte {error.start})") from None
    prefix = [tokenizer.bos_token_id] if tokenizer.add_bos_token and tokenizer.bos_token_id is not None else []
    return tokenizer.encode_plain(text), prefix


def make_prompts(ids: list[int], prefix: list[int], count: int, length: int) -> list[list[int]]:
    """`count` different prompts of `length` tokens each: `prefix`, then pieces of the text, one behind another.

    Raises UsageError where the text is too short for them.
    """
    size = length - len(prefix)
    if size < 1:
        raise UsageError(f"a prompt of {length} tokens has no room beside the BOS token")
    # Pieces may overlap where the text is short, but no two may begin alike: a prefix cache would find them.
    stride = min(size, (len(ids) - size) // (count - 1)) if count > 1 else size
    if size > len(ids) or stride < 1:
        raise UsageError(
            f"{len(ids):,} tokens of text are too few for {count} prompts of {length:,}: give a longer one with --text"
        )
    return [prefix + ids[i * stride : i * stride + size] for i in range(count)]
