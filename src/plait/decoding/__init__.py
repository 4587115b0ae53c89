"""Decoding strategies, scoring and metrics on plain tensors, for any `Decoder` and for Hugging Face models.

Everything here is imported when it is first used.
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "Filters": "filters",
    "row_generators": "filters",
    "sample": "filters",
    "DecoderModel": "models",
    "HuggingFaceModel": "models",
    "Generation": "generation",
    "generate": "generation",
    "left_padded": "generation",
    "continuation_nll": "scoring",
    "Beams": "beam",
    "beam_search": "beam",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plait.decoding' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"plait.decoding.{_HOMES[name]}"), name)
