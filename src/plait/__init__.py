"""plait: one language-model definition from training to serving.

Everything here is imported when it is first used, so that `import plait` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.engine.llm import LLM
    from plait.engine.params import SamplingParams
    from plait.errors import PlaitError
    from plait.model.decoder import Decoder, from_config
    from plait.weights.load import load

__version__ = "0.1.0"
__all__ = ["LLM", "Decoder", "PlaitError", "SamplingParams", "__version__", "from_config", "load"]

_HOMES = {
    "LLM": "plait.engine.llm",
    "SamplingParams": "plait.engine.params",
    "PlaitError": "plait.errors",
    "Decoder": "plait.model.decoder",
    "from_config": "plait.model.decoder",
    "load": "plait.weights.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
