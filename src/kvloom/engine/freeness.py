"""Freeness: the number of decode steps for which a unit's batch finds room (Llumnix, section 4.4).

F = (M − ΣV) / B. In the paper all are tokens: M the instance's memory, ΣV the virtual usage, B the batch's
size, which is also the tokens that a step makes. On a unit M and ΣV are blocks of the pool that its models
share, and B is the blocks that a step of each of them takes: running sequences times a token's blocks, summed
over models. A count of sequences would not do: one of a large model fills the pool many times as fast as one
of a small model. So F is decode steps, whatever the unit serves, and units can be compared. With one model F
is the paper's; its artifact counts blocks of 16 tokens a request, which are F / 16.

Below zero F is what is missing, M − ΣV, over a token's blocks of the unit's largest model: tokens of that
one. The paper divides by B as well, so of two units that miss the same the larger batch would look freer, and
draw what comes. In blocks alone units whose models have unlike K and V could not be compared.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from msgspec import structs

from kvloom.types.load import LevelLoad, UnitLoad
from kvloom.types.request import Level, level_of


def held(load: UnitLoad) -> int:
    """Returns the blocks that what runs here has taken, and has yet to take for its prompts, those that are
    lent, and those whose memory the weights of models with requests have: the weights of other models would
    fall asleep."""
    weights = sum(model.weights.blocks for model in load.models.values() if model.weights and model.busy)
    used = sum(model.used_blocks + model.begun_blocks for model in load.models.values())
    return load.lent_blocks + weights + used


def demanded(load: UnitLoad) -> int:
    """Returns the blocks that the first waiting request of each model needs."""
    return sum(model.head_blocks for model in load.models.values())


def wanted(load: UnitLoad) -> int:
    """Returns the blocks that are held, and those that all waiting requests need: memory load, as INFaaS++
    has it (Llumnix, section 6.1)."""
    return held(load) + sum(model.waiting_blocks for model in load.models.values())


def headroom(load: UnitLoad) -> float:
    """Returns the blocks that stay free for priorities."""
    running: Counter[int] = Counter()
    for model in load.models.values():
        for level in model.levels:
            running[level.priority] += level.running
    return sum(
        level.headroom * model.token_blocks * level.running / running[level.priority]
        for model in load.models.values()
        for level in model.levels
        if level.running
    )


def virtual_usage(load: UnitLoad) -> float:
    """Returns blocks: more than the pool has if too much waits or is kept free, infinite if the unit
    drains."""
    return math.inf if load.draining else held(load) + demanded(load) + headroom(load)


def batch(load: UnitLoad) -> float:
    """Returns the blocks that a decode step takes on average. If nothing runs yet, the requests that wait
    first are the batch."""
    models = load.models.values()
    step = sum(model.running * model.token_blocks for model in models)
    return step or sum(model.token_blocks for model in models if model.waiting)


def freeness(load: UnitLoad) -> float:
    """Returns decode steps. If more is wanted than there is, it returns the tokens of the largest model that
    are missing, as a negative number; −∞ if the unit drains; ∞ if it is idle."""
    if load.draining:
        return -math.inf
    left, step = load.total_blocks - virtual_usage(load), batch(load)
    if left <= 0:  # also where nothing runs, and all is promised
        return left / max((model.token_blocks for model in load.models.values()), default=1.0)
    return left / step if step else math.inf


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it is known before it runs there."""

    model: str
    prompt: int  # tokens
    choices: int = 1
    priority: int = 0
    made: int = 0  # tokens that its choices have together, if it ran elsewhere before

    def placed(self, load: UnitLoad) -> UnitLoad:
        """Returns the load once the request runs there, its prompt held once for all choices, at the level
        that its priority has on that unit; the same load if its model is not served."""
        own = load.model(self.model)
        if own is None:
            return load
        return after(
            load,
            load.base_of(self.model),
            self.choices,
            own.blocks(self.prompt + self.made),
            self._level(load),
        )

    def freeness(self, load: UnitLoad) -> float:
        """Returns the freeness of the load once the request runs there."""
        return freeness(self.placed(load))

    def lacks(self, load: UnitLoad) -> float:
        """Returns the room that is missing once the request runs there, and all that waits, in tokens of the
        unit's largest model; negative if there is room left."""
        placed = self.placed(load)
        missing = wanted(placed) + headroom(placed) - placed.total_blocks
        return missing / max((one.token_blocks for one in placed.models.values()), default=1.0)

    def headroom(self, load: UnitLoad) -> int:
        """Returns by how many tokens of its model more must be kept free there for its level; 0 if other
        requests have this level already."""
        own = load.model(self.model)
        if own is None or self._level(load) is None:
            return 0
        more = headroom(self.placed(load)) - headroom(load)
        return max(0, round(more / own.token_blocks))

    def _level(self, load: UnitLoad) -> Level | None:
        return level_of(self.priority, load.priorities)


def after(load: UnitLoad, model: str, sequences: int, blocks: int, level: Level | None = None) -> UnitLoad:
    """Returns the load once so many more sequences of `model`, which hold so many blocks together, run there.
    level: their execution priority's."""
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


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of freeness, in decode steps, below and above which units give and take requests. Raises
    ValueError if one unit could do both. The defaults are the artifact's 1.5 and 3 blocks a request."""

    out: float = 24.0
    """Units below it give requests away."""
    into: float = 48.0
    """Units above it take requests."""
    floor: float | None = None
    """Units that take keep at least this; None: `out`, so that they need not give away what they took."""

    def __post_init__(self) -> None:
        if not self.out <= self.into:
            raise ValueError(
                f"out {self.out:g} is above into {self.into:g}: a unit would give away what it has just "
                "taken; out ≤ into is right"
            )

    @property
    def kept(self) -> float:
        """The freeness that a unit keeps when it takes a request."""
        return self.out if self.floor is None else self.floor
