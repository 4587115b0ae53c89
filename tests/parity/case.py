"""What a parity case is, and the sizes that most of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """raw: config.json. name: what is particular about it."""

    name: str
    raw: dict[str, Any]

    @property
    def family(self) -> str:
        return self.raw["model_type"]

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


def family(model_type: str, **common: Any) -> Callable[..., Case]:
    """A maker of cases: name and config keys beside the common ones -> case."""

    def case(name: str, **changes: Any) -> Case:
        return Case(name, {"model_type": model_type, **common, **changes})

    return case


SMALL = {
    "vocab_size": 97,
    "hidden_size": 72,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
