"""What is common to the settings of all optimisers: an interface, and checks of values."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from plait.errors import UsageError
from plait.training.roles import DECAYED, ROLES, WITHOUT_GRADIENT, Described, Role

if TYPE_CHECKING:
    from plait.training.optimizers.base import RoleOptimizer

# With DECAYED and WITHOUT_GRADIENT these are all roles.
UNDECAYED: tuple[Role, ...] = tuple(role for role in ROLES if role not in (*DECAYED, *WITHOUT_GRADIENT))


class Settings(Protocol):
    """An optimiser's hyperparameters: a frozen dataclass whose every field has a default."""

    def build(self, described: list[Described]) -> RoleOptimizer:
        """The optimiser of these parameters."""


def not_negative(**values: Any) -> None:
    """Raises UsageError for a value that is no finite number of at least 0."""
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value < float("inf"):
            raise UsageError(f"{name} must be a number of at least 0, not {value!r}")


def positive(**values: Any) -> None:
    """Raises UsageError for a value that is no finite number above 0."""
    for name, value in values.items():
        if not _is_number(value) or not 0 < value < float("inf"):
            raise UsageError(f"{name} must be a number above 0, not {value!r}")


def shares(**values: Any) -> None:
    """Raises UsageError for a value outside [0, 1)."""
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value < 1:
            raise UsageError(f"{name} must be at least 0 and below 1, not {value!r}")


def two_shares(**values: Any) -> None:
    """Raises UsageError for a value that is no pair of numbers in [0, 1)."""
    for name, value in values.items():
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise UsageError(f"{name} must be two numbers, not {value!r}")
        shares(**{f"{name}[{i}]": number for i, number in enumerate(value)})


def whole(**values: Any) -> None:
    """Raises UsageError for a value that is no whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")


def switch(**values: Any) -> None:
    """Raises UsageError for a value that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false, not {value!r}")


def one_of(choices: tuple[str, ...], **values: Any) -> None:
    """Raises UsageError for a value that is none of the choices."""
    for name, value in values.items():
        if value not in choices:
            raise UsageError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
