"""Decides how many replicas a unit has, by the fleet's mean freeness (Llumnix, section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvloom.engine.freeness import batch, virtual_usage, wanted
from kvloom.types.load import UnitLoad
from kvloom.types.service import Scale

Usage = Callable[[UnitLoad], float]  # blocks of a unit's pool that count as taken


@dataclass(frozen=True, slots=True)
class Outside:
    """The mean freeness has been too low or too high for some time."""

    side: Literal["low", "high"]
    since: float
    """The time in seconds at which that began."""


@dataclass(frozen=True, slots=True)
class AddReplicas:
    """So many replicas are to be added."""

    count: int = 1


@dataclass(frozen=True, slots=True)
class RemoveReplica:
    """This unit is to be drained and removed."""

    unit: str


Step = AddReplicas | RemoveReplica


def mean_freeness(loads: Mapping[str, UnitLoad], usage: Usage = virtual_usage) -> float:
    """Returns the mean freeness, in decode steps, of the units that do not drain. Each unit's is weighted by
    its batch, so the mean is all free memory over all batches: an idle unit counts with its memory, and not
    as infinity. Returns ∞ if all are idle, or there is none."""
    left, step = _room(loads, usage)
    return left / step if step else math.inf


def _room(loads: Mapping[str, UnitLoad], usage: Usage) -> tuple[float, float]:
    """Returns the bytes that are left in the pools of the units that do not drain, and those that their
    decode steps take."""
    serving = [load for load in loads.values() if not load.draining]
    left = sum((load.total_blocks - usage(load)) * load.block_bytes for load in serving)
    return left, sum(batch(load) * load.block_bytes for load in serving)


def _pool(load: UnitLoad) -> int:
    return load.total_blocks * load.block_bytes


def missing(loads: Mapping[str, UnitLoad], starting: int, low: float) -> int:
    """Returns how many more idle replicas bring the mean freeness up to `low` with room for all requests that
    wait; at least one. loads: those of the replicas that serve; starting: replicas that count as there
    already. A queue whose first request alone counted would tell that there is too little room, and not how
    much."""
    left, step = _room(loads, wanted)
    pool = sum(map(_pool, loads.values())) / len(loads)
    return max(1, math.ceil((low * step - left) / pool) - starting)


def spared(loads: Mapping[str, UnitLoad], unit: str, low: float, usage: Usage) -> bool:
    """Returns whether the mean stays at `low` or above without this unit, with its load on the others."""
    left, step = _room(loads, usage)
    return left - _pool(loads[unit]) >= low * step


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
    """Returns what the next call needs, and the step to take now, if any. loads: those of one unit's
    replicas; starting: replicas that do not report yet; waits: whether requests wait for a replica; idle:
    seconds since there was any request. Too few or too many replicas are corrected at once, one in each call,
    and so is none if requests wait. The last replica goes if nobody has asked for it for the scale's `idle`.
    """
    serving = {name: load for name, load in loads.items() if not load.draining}
    count = len(serving) + starting
    if count < scale.least or (waits and not count):
        return None, AddReplicas()
    spare = len(serving) > max(1, scale.least)
    unused = not scale.least and not waits and idle >= scale.idle
    if serving and (unused or (count > scale.most and spare)):
        return None, RemoveReplica(fewest_running(serving))
    asked = any(map(_asked, serving.values()))
    outside = _watched(mean_freeness(serving, usage), outside, now, scale) if asked else None
    if outside is None or now - outside.since < scale.seconds:
        return outside, None
    if outside.side == "low" and count < scale.most:
        return None, AddReplicas(min(missing(serving, starting, scale.low), scale.most - count))
    least = fewest_running(serving)
    if outside.side == "high" and spare and spared(serving, least, scale.low, usage):
        return None, RemoveReplica(least)
    return outside, None


def _asked(load: UnitLoad) -> bool:
    """Returns whether the unit has or had a request: a fleet that has just begun is idle, which tells nothing
    of its load."""
    return any(one.running or one.waiting or one.prompt_tokens_total for one in load.models.values())


def fewest_running(loads: Mapping[str, UnitLoad]) -> str:
    """Returns the unit that is to drain: the one with the fewest requests to move, the last by name among
    equals."""
    fewest = min(load.running for load in loads.values())
    return max(name for name, load in loads.items() if load.running == fewest)


def _watched(mean: float, outside: Outside | None, now: float, scale: Scale) -> Outside | None:
    if scale.low <= mean <= scale.high:
        return None
    side: Literal["low", "high"] = "low" if mean < scale.low else "high"
    return outside if outside and outside.side == side else Outside(side, now)
