"""The exceptions that plait raises on purpose: one line each, naming the thing and the remedy."""

from __future__ import annotations


class PlaitError(Exception):
    """Base of every error that plait raises on purpose. The command line prints it as one line."""

    exit_status = 1


class UsageError(PlaitError):
    """The request itself is wrong (a flag, an argument, a path that does not exist)."""

    exit_status = 2


class ConfigError(PlaitError):
    """A model configuration that plait cannot carry out; the message names key and value."""


class WeightError(PlaitError):
    """A checkpoint file that is damaged, incomplete or does not fit the configuration."""


class TokenizerError(PlaitError):
    """A tokenizer or chat template that cannot be built or used."""


class RequestError(PlaitError, ValueError):
    """A generation request with an unusable value; `field` names the parameter (HTTP 400)."""

    exit_status = 2

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(RequestError):
    """A request that can never fit in the context or in the key/value pool; the message has the numbers."""


class RecordingError(PlaitError):
    """The forward did something outside the closed set of operations while it was being recorded."""


class EngineError(PlaitError):
    """The engine cannot go on (its process died, its state failed an integrity check)."""
