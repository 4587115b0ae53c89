"""The exceptions that plait raises on purpose: one line each, naming the thing and the remedy."""

from __future__ import annotations

# Of a longer message the middle is left out: what is wrong stands at its beginning, the remedy at its end.
_MAX_CHARS = 1500
_END_CHARS = 500


class PlaitError(Exception):
    """Base of every error that plait raises on purpose, one line that a hostile file cannot make long or break up."""

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        if len(message.splitlines()) > 1:
            message = " ".join(message.split())
        if len(message) > _MAX_CHARS:
            message = f"{message[: _MAX_CHARS - _END_CHARS]} ... {message[-_END_CHARS:]}"
        super().__init__(message)


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


class DataError(PlaitError):
    """Training data that cannot be read or used; the message names file and line, or an example."""


class RecordingError(PlaitError):
    """The forward did something outside the closed set of operations while it was being recorded."""


class TrainingError(PlaitError):
    """A training run that cannot go on, or a run directory that cannot be used."""


class EngineError(PlaitError):
    """The engine cannot go on (its process died, its state failed an integrity check)."""
