"""To which unit a new request goes, of those that serve its model.

Ties are broken by turn: who was chosen longest ago, the smallest number, is next. A unit that drains is never
chosen; None where all do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import structs

from kvloom.core.load import LevelLoad, UnitLoad
from kvloom.core.priority import Level
from kvloom.fleet.freeness import freeness

Unit = TypeVar("Unit")
Dispatch = Callable[[Mapping[Unit, UnitLoad], Mapping[Unit, int]], Unit | None]


def freest(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int]) -> Unit | None:
    """To the one of most freeness (Llumnix, section 4.4)."""
    return _least(loads, turns, lambda load: -freeness(load))


def round_robin(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int]) -> Unit | None:
    return _least(loads, turns, lambda load: 0.0)


def infaas(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int]) -> Unit | None:
    """INFaaS++: to the one with least of its memory in use, all that waits counted as if it ran (Llumnix,
    section 6.1)."""
    return _least(loads, turns, _memory)


def after(load: UnitLoad, model: str, sequences: int, blocks: int, level: Level | None = None) -> UnitLoad:
    """The load once so many more sequences of `model`, which hold so many blocks together, run there. level:
    their execution priority's."""
    own = load.models[model]
    levels = own.levels if level is None else _with_level(own.levels, level, sequences)
    more = structs.replace(
        own, running=own.running + sequences, used_blocks=own.used_blocks + blocks, levels=levels
    )
    free = max(0, load.free_blocks - blocks)
    return structs.replace(load, free_blocks=free, models={**load.models, model: more})


def _with_level(levels: tuple[LevelLoad, ...], level: Level, sequences: int) -> tuple[LevelLoad, ...]:
    others = tuple(one for one in levels if one.priority != level.priority)
    running = sum(one.running for one in levels if one.priority == level.priority)
    own = LevelLoad(priority=level.priority, headroom=level.headroom, running=running + sequences)
    return (*others, own)


def _memory(load: UnitLoad) -> float:
    wanted = sum(m.used_blocks + m.begun_blocks + m.waiting_blocks for m in load.models.values())
    return (wanted + load.lent_blocks) / load.total_blocks


def _least(
    loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], cost: Callable[[UnitLoad], float]
) -> Unit | None:
    open_ = [(cost(load), turns[unit], unit) for unit, load in loads.items() if not load.draining]
    return min(open_, key=lambda one: one[:2])[2] if open_ else None
