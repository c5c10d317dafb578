"""How many replicas a unit has, by the fleet's mean freeness (Llumnix, section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvloom.core.load import UnitLoad
from kvloom.core.replicas import Scale
from kvloom.fleet.freeness import batch
from kvloom.fleet.usage import virtual_usage

Usage = Callable[[UnitLoad], float]  # blocks of a unit's pool that count as taken


@dataclass(frozen=True, slots=True)
class Outside:
    """Since when, in seconds, the mean has been too low or too high."""

    side: Literal["low", "high"]
    since: float


@dataclass(frozen=True, slots=True)
class Start:
    """One more replica."""


@dataclass(frozen=True, slots=True)
class Drain:
    """One less: this unit."""

    unit: str


Step = Start | Drain


def mean_freeness(loads: Mapping[str, UnitLoad], usage: Usage = virtual_usage) -> float:
    """Of the units that do not drain, in decode steps: each one's weighted by its batch, which is all free
    memory over all batches. So an idle unit counts with what it has, and not as infinity; ∞ where all are
    idle, or there is none."""
    left, step = 0.0, 0.0
    for load in loads.values():
        if not load.draining:
            left += (load.total_blocks - usage(load)) * load.block_bytes
            step += batch(load) * load.block_bytes
    return left / step if step else math.inf


def rescale(
    loads: Mapping[str, UnitLoad],
    starting: int,
    outside: Outside | None,
    now: float,
    scale: Scale,
    *,
    waits: bool = False,
    idle: float = 0.0,
    usage: Usage = virtual_usage,
) -> tuple[Outside | None, Step | None]:
    """What to do now, and what to hand in the next time. loads: of one unit's replicas; starting: replicas
    that do not report yet; waits: requests wait for one; idle: seconds since there was any. Too few or too
    many replicas are put right at once, one each time; so is none where requests wait. The last goes where
    nobody has asked for it for the scale's `idle`."""
    serving = {name: load for name, load in loads.items() if not load.draining}
    count = len(serving) + starting
    if count < scale.least or (waits and not count):
        return None, Start()
    spare = len(serving) > max(1, scale.least)
    unused = not scale.least and not waits and idle >= scale.idle
    if serving and (unused or (count > scale.most and spare)):
        return None, Drain(fewest_running(serving))
    outside = _watched(mean_freeness(serving, usage), outside, now, scale) if serving else None
    if outside is None or now - outside.since < scale.seconds:
        return outside, None
    if outside.side == "low" and count < scale.most:
        return None, Start()
    if outside.side == "high" and spare:
        return None, Drain(fewest_running(serving))
    return outside, None


def fewest_running(loads: Mapping[str, UnitLoad]) -> str:
    """Which of them drains: where least has to be moved, and of these the last by name."""
    fewest = min(load.running for load in loads.values())
    return max(name for name, load in loads.items() if load.running == fewest)


def _watched(mean: float, outside: Outside | None, now: float, scale: Scale) -> Outside | None:
    if scale.low <= mean <= scale.high:
        return None
    side: Literal["low", "high"] = "low" if mean < scale.low else "high"
    return outside if outside and outside.side == side else Outside(side, now)
