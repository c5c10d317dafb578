"""How many replicas a unit has, by the fleet's mean freeness (Llumnix, section 4.4)."""

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
    """Since when, in seconds, the mean has been too low or too high."""

    side: Literal["low", "high"]
    since: float


@dataclass(frozen=True, slots=True)
class AddReplicas:
    """So many replicas more."""

    count: int = 1


@dataclass(frozen=True, slots=True)
class RemoveReplica:
    """One less: this unit."""

    unit: str


Step = AddReplicas | RemoveReplica


def mean_freeness(loads: Mapping[str, UnitLoad], usage: Usage = virtual_usage) -> float:
    """Of the units that do not drain, in decode steps: each one's weighted by its batch, which is all free
    memory over all batches. So an idle unit counts with what it has, and not as infinity; ∞ where all are
    idle, or there is none."""
    left, step = _room(loads, usage)
    return left / step if step else math.inf


def _room(loads: Mapping[str, UnitLoad], usage: Usage) -> tuple[float, float]:
    """Bytes that are left in all pools, and that a decode step takes, of the units that do not drain."""
    serving = [load for load in loads.values() if not load.draining]
    left = sum((load.total_blocks - usage(load)) * load.block_bytes for load in serving)
    return left, sum(batch(load) * load.block_bytes for load in serving)


def _pool(load: UnitLoad) -> int:
    return load.total_blocks * load.block_bytes


def missing(loads: Mapping[str, UnitLoad], starting: int, low: float) -> int:
    """How many idle replicas more bring the mean freeness of what runs now up to `low` beside room for all
    that waits, those that start already counted as there: one at least. loads: of replicas that serve. A
    queue of which only the first counts says that there is too little, and not how much."""
    left, step = _room(loads, wanted)
    pool = sum(map(_pool, loads.values())) / len(loads)
    return max(1, math.ceil((low * step - left) / pool) - starting)


def spared(loads: Mapping[str, UnitLoad], unit: str, low: float, usage: Usage) -> bool:
    """Whether the mean is not below `low` without this unit, with all that runs there on the others."""
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
    """What to do now, and what to hand in the next time. loads: of one unit's replicas; starting: replicas
    that do not report yet; waits: requests wait for one; idle: seconds since there was any. Too few or too
    many replicas are put right at once, one each time; so is none where requests wait. The last goes where
    nobody has asked for it for the scale's `idle`."""
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
    """It has, or has had, a request: a fleet that has just begun is idle, which tells nothing of its load."""
    return any(one.running or one.waiting or one.prompt_tokens_total for one in load.models.values())


def fewest_running(loads: Mapping[str, UnitLoad]) -> str:
    """Which of them drains: where least has to be moved, and of these the last by name."""
    fewest = min(load.running for load in loads.values())
    return max(name for name, load in loads.items() if load.running == fewest)


def _watched(mean: float, outside: Outside | None, now: float, scale: Scale) -> Outside | None:
    if scale.low <= mean <= scale.high:
        return None
    side: Literal["low", "high"] = "low" if mean < scale.low else "high"
    return outside if outside and outside.side == side else Outside(side, now)
