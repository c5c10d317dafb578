"""What a unit's load is once more runs there."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from kvloom.core.load import LevelLoad, UnitLoad
from kvloom.core.priority import Level, level_of
from kvloom.fleet.freeness import freeness
from kvloom.fleet.usage import headroom, wanted


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it is known before it runs there. prompt: in tokens. choices: sequences that answer it.
    made: tokens that these have already, together, where it ran elsewhere before."""

    model: str
    prompt: int
    choices: int = 1
    priority: int = 0
    made: int = 0

    def placed(self, load: UnitLoad) -> UnitLoad:
        """The load once it runs there, its prompt held once for all choices, at the level that its priority
        has on that unit; the same load where its model is not served."""
        own = load.models.get(self.model)
        if own is None:
            return load
        return after(load, self.model, self.choices, own.blocks(self.prompt + self.made), self._level(load))

    def freeness(self, load: UnitLoad) -> float:
        """Of the load `placed`."""
        return freeness(self.placed(load))

    def lacks(self, load: UnitLoad) -> float:
        """Room that is missing once it runs there, and all that waits, in tokens of the unit's largest model;
        negative where some is left."""
        placed = self.placed(load)
        missing = wanted(placed) + headroom(placed) - placed.total_blocks
        return missing / max((one.token_blocks for one in placed.models.values()), default=1.0)

    def headroom(self, load: UnitLoad) -> int:
        """Tokens of its model by which more is kept free there for its level: none where others have paid."""
        own = load.models.get(self.model)
        if own is None or self._level(load) is None:
            return 0
        more = headroom(self.placed(load)) - headroom(load)
        return max(0, round(more / own.token_blocks))

    def _level(self, load: UnitLoad) -> Level | None:
        return level_of(self.priority, load.priorities)


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
