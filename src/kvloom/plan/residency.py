"""Estimates for what part of the time each model's weights are awake, and how long requests wait for weights
that are not, if the models of a unit share a budget that does not hold them all.

Memory is taken for a cache of weights: Che, Tung and Wang, "Hierarchical web caching systems", 2002.
Wakes come one after the other, as from a queue with Poisson arrivals and one server: Pollaczek and Khinchine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, isinf
from typing import Final

from kvloom.plan.cost.loading import wake_seconds

_STEPS: Final = 200


@dataclass(frozen=True, slots=True)
class UnitResidency:
    """The residency of the weights of a unit's models, in the models' order."""

    awake: tuple[float, ...]
    """The part of the time in which each model is awake. The other requests of the model are cold, as Poisson
    arrivals see time averages."""
    waits: tuple[float, ...]
    """The mean seconds for which a cold request of each model waits, until all of its weights are there."""
    loads: tuple[float, ...]
    """The seconds of these that its own weights take."""
    busy: float
    """The part of the time in which weights are being loaded (ρ); the unit cannot be if it is 1 or more."""

    def late(self, at: int, due: float) -> float:
        """Returns the part of a model's cold requests that wait for more than `due` seconds. The wait for
        others' wakes has the tail that it has in M/M/1: P(W > t) = ρ exp(−ρ t / E[W])."""
        left, queued = due - self.loads[at], self.waits[at] - self.loads[at]
        if left < 0.0:
            return 1.0
        return self.busy * exp(-self.busy * left / queued) if queued > 0.0 else 0.0


def unit_residency(
    rates: Sequence[float], weights: Sequence[int], room: float, bandwidth: float
) -> UnitResidency:
    """Returns whose weights are awake. `rates` are requests a second, `weights` the bytes of each model's,
    `room` the bytes that there are for weights, and `bandwidth` the bytes a second at which they load."""
    time = characteristic_time(rates, weights, _whole(weights, room))
    awake = tuple(1.0 if isinf(time) else 1.0 - exp(-rate * time) for rate in rates)
    loads = tuple(wake_seconds(size, bandwidth) for size in weights)
    wakes = [rate * (1.0 - there) for rate, there in zip(rates, awake, strict=True)]
    queued = mean_wait(wakes, loads)
    busy = sum(wake * load for wake, load in zip(wakes, loads, strict=True))
    return UnitResidency(awake, tuple(queued + load for load in loads), loads, busy)


def characteristic_time(rates: Sequence[float], weights: Sequence[int], room: float) -> float:
    """Returns Che's T, for which Σ wᵢ (1 − exp(−λᵢ T)) = room: who was asked for in the last T seconds is in
    memory. It is infinite if all fit. All `rates` are more than 0."""
    if sum(weights) <= room:
        return inf
    time = 0.0
    for _ in range(_STEPS):  # Newton's steps: the sum is concave, so they come from below and never pass T
        asleep = [w * exp(-rate * time) for rate, w in zip(rates, weights, strict=True)]
        slope = sum(rate * w for rate, w in zip(rates, asleep, strict=True))
        step = (room - sum(weights) + sum(asleep)) / slope if slope else 0.0
        time += max(0.0, step)
        if step <= 1e-9 * time:
            break
    return time


def mean_wait(rates: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns the mean seconds that one who comes to an M/G/1 queue waits before its turn: λ E[S²] / (2 (1 −
    ρ)) (Pollaczek and Khinchine); they are infinite if the queue grows for ever. `rates` and `seconds` are
    those of each kind of work."""
    busy = sum(rate * time for rate, time in zip(rates, seconds, strict=True))
    square = sum(rate * time * time for rate, time in zip(rates, seconds, strict=True))
    return square / (2.0 * (1.0 - busy)) if busy < 1.0 else inf


def _whole(weights: Sequence[int], room: float) -> float:
    """Returns the room without what is left over beside as many whole models as it holds: nobody's
    weights are half in memory."""
    mean = sum(weights) / len(weights)
    return room if sum(weights) <= room else max(min(weights), room // mean * mean)
