"""Learning rates on the token clock: a factor for every share of the tokens that training will see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi, sqrt

from plait.errors import UsageError


@dataclass(frozen=True)
class ScheduleConfig:
    """kind: one of SCHEDULES. warmup: share of the tokens over which the rate rises linearly from 0. floor: the least
    factor, at the end. decay: share of the tokens at the end over which `wsd` falls linearly."""

    kind: str = "cosine"
    warmup: float = 0.02
    floor: float = 0.1
    decay: float = 0.2


def _cosine(share: float, c: ScheduleConfig) -> float:
    """Loshchilov and Hutter 2017, one half wave from 1 to the floor."""
    after = (share - c.warmup) / (1.0 - c.warmup) if c.warmup < 1.0 else 1.0
    return c.floor + (1.0 - c.floor) * 0.5 * (1.0 + cos(pi * after))


def _wsd(share: float, c: ScheduleConfig) -> float:
    """Hu et al. 2024 (MiniCPM): warm up, stay, decay."""
    left = (1.0 - share) / c.decay if c.decay else 1.0
    return c.floor + (1.0 - c.floor) * min(1.0, left)


def _inverse_sqrt(share: float, c: ScheduleConfig) -> float:
    """Vaswani et al. 2017: sqrt(warmup / share), 1 at the end of the warm-up."""
    return max(c.floor, sqrt(c.warmup / share))


def _constant(share: float, c: ScheduleConfig) -> float:
    return 1.0


SCHEDULES: dict[str, Callable[[float, ScheduleConfig], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
}


def factor(config: ScheduleConfig, tokens: int, total_tokens: int) -> float:
    """What a learning rate is multiplied by in the step at whose end `tokens` non-padding tokens have been seen.

    The clock is the data's and not the optimiser's: a step that was skipped moves it as any other.
    """
    share = min(1.0, tokens / total_tokens)
    if share < config.warmup:
        return share / config.warmup
    return SCHEDULES[config.kind](share, config)


def check_schedule(config: ScheduleConfig) -> None:
    """Raises UsageError for a schedule that cannot be."""
    if config.kind not in SCHEDULES:
        raise UsageError(f"schedule.kind={config.kind!r:.40}: choose {', '.join(SCHEDULES)}")
    for name in ("warmup", "floor", "decay"):
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise UsageError(f"schedule.{name}={getattr(config, name)} must be a share between 0 and 1")
    if config.kind == "inverse_sqrt" and not config.warmup:
        raise UsageError("schedule.warmup=0: inverse_sqrt needs a warm-up, whose end it is measured by")
