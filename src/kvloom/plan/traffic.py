"""The demand that a plan is made for, from the traffic log of a gateway."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvloom.journal.traffic import HOUR, MINUTES, TrafficHour
from kvloom.types.errors import ConfigError

At = Literal["peak", "mean"]
"""The part of the traffic that a plan is for: its busiest hour, or all of it."""

LEAST_SECONDS: Final = HOUR
"""The shortest time of traffic by which a fleet can be sized."""
LEAST_REQUESTS: Final = 100
"""The fewest requests by which a fleet can be sized: the rate of so many is a tenth off, at random."""
_MINUTE: Final = HOUR // MINUTES


@dataclass(frozen=True, slots=True)
class SeenDemand:
    """The demand for one model: requests a second, and mean tokens of prompts and answers."""

    rate: float
    prompt: float
    output: float


@dataclass(frozen=True, slots=True)
class SeenTraffic:
    """The demand for some models, as a log has it."""

    models: dict[str, SeenDemand]
    """The demand for each model that was asked for."""
    mean: SeenDemand
    """The demand for all of them together."""
    hour: int | None
    """The time when the hour began whose rates these are, in seconds since the epoch; None if they are
    means."""
    seconds: int
    """The seconds over which they were counted."""
    others: tuple[str, ...]
    """The models of the log for which nobody plans."""
    covered: int
    """The seconds from the first minute with a request for these models to the last, in the whole log."""
    asked: int
    """The requests of the whole log for these models."""

    @property
    def is_scarce(self) -> bool:
        """Returns whether the log has too little to size a fleet by."""
        return self.covered < LEAST_SECONDS or self.asked < LEAST_REQUESTS


@dataclass(slots=True)
class _Asked:
    """The sums over hours of one model's traffic."""

    asked: int = 0
    requests: int = 0
    prompt: int = 0
    output: int = 0

    def add(self, hour: TrafficHour) -> None:
        self.asked += hour.asked
        self.requests += hour.requests
        self.prompt += hour.prompt_tokens
        self.output += hour.output_tokens

    def demand(self, seconds: int) -> SeenDemand:
        """Returns the demand if it was asked in so many seconds. Lengths are one token at least, as plans
        have them."""
        count = max(1, self.requests)
        return SeenDemand(self.asked / seconds, max(1.0, self.prompt / count), max(1.0, self.output / count))


@dataclass(slots=True)
class _Window:
    """The traffic of some hours, by model."""

    seconds: int
    models: dict[str, _Asked] = field(default_factory=dict)
    all: _Asked = field(default_factory=_Asked)
    work: int = 0
    """The tokens that were computed."""

    def add(self, hour: TrafficHour) -> None:
        self.models.setdefault(hour.base or hour.model, _Asked()).add(hour)
        self.all.add(hour)
        self.work += hour.prompt_tokens - hour.cached_tokens + hour.output_tokens


def seen_traffic(hours: Sequence[TrafficHour], models: Collection[str], at: At, now: float) -> SeenTraffic:
    """Returns what a log says of these models. An adapter's requests count for its base.

    With `peak` rates and lengths are those of the hour in which the fleet computed the most tokens a second
    for all models together, because they share devices: their own busiest hours, added up, never were.
    A model that was asked more often on average than in that hour has its mean rate. Hours that are not
    over, or in which the log begins, count only if there is no other. With `mean` all hours count, and those
    between them in which nobody asked.
    Requests without an answer count by the lengths of the others.

    `now` is in seconds since the epoch. Raises ConfigError if nobody asked for any of these models."""
    ours = [hour for hour in hours if (hour.base or hour.model) in models and hour.asked]
    if not ours:
        there = ", ".join(sorted({hour.base or hour.model for hour in hours})) or "none"
        raise ConfigError(f"no traffic for {', '.join(models)}; models with traffic: {there}")
    first, last = _ends(ours)
    covered = covered_seconds(ours, now)
    every, each = _Window(last - first), dict[int, _Window]()
    for part in ours:
        every.add(part)
        each.setdefault(part.hour, _Window(covered[part.hour])).add(part)
    found = {name: asked.demand(every.seconds) for name, asked in every.models.items()}
    begun, seconds = None, every.seconds
    if at == "peak":
        able = {begin: one for begin, one in each.items() if _is_whole(begin, first, now)} or each
        begun, peak = max(able.items(), key=lambda pair: (pair[1].work / pair[1].seconds, pair[0]))
        seconds = peak.seconds
        found = {name: _higher(mean, peak.models.get(name), seconds) for name, mean in found.items()}
    return SeenTraffic(
        models=found,
        mean=every.all.demand(every.seconds),
        hour=begun,
        seconds=seconds,
        others=tuple(sorted({hour.base or hour.model for hour in hours} - {*models})),
        covered=every.seconds,
        asked=every.all.asked,
    )


def covered_seconds(hours: Sequence[TrafficHour], now: float) -> dict[int, int]:
    """Returns for each hour of a log how many of its seconds the log has. The hour in which the log begins
    counts from its first minute with a request, and the one that is not over counts to its last. `now` is in
    seconds since the epoch."""
    if not hours:
        return {}
    first, last = _ends(hours)
    return {
        begin: HOUR if _is_whole(begin, first, now) else min(last, begin + HOUR) - max(first, begin)
        for begin in {hour.hour for hour in hours}
    }


def _is_whole(hour: int, first: int, now: float) -> bool:
    """Returns whether an hour is over and all of it is in a log that begins at `first`."""
    return first <= hour and hour + HOUR <= now


def _higher(mean: SeenDemand, peak: _Asked | None, seconds: int) -> SeenDemand:
    """Returns what a model was asked in an hour, or on average if that is more."""
    if peak is None or not peak.requests:
        rate = peak.asked / seconds if peak else 0.0
        return SeenDemand(max(mean.rate, rate), mean.prompt, mean.output)
    found = peak.demand(seconds)
    return found if found.rate >= mean.rate else mean


def _ends(hours: Sequence[TrafficHour]) -> tuple[int, int]:
    """Returns when the first minute with a request began, and when the last one ended."""
    first = min(hour.hour + min(hour.minutes, default=0) * _MINUTE for hour in hours)
    last = max(hour.hour + (max(hour.minutes, default=MINUTES - 1) + 1) * _MINUTE for hour in hours)
    return first, last
