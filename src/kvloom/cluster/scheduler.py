"""The fleet scheduler looks at all units once a period, and says between which of them requests move, and
which units come and go (Llumnix, section 4.2)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final, Protocol, TypeVar

from msgspec.structs import replace

from kvloom.cluster.policies.autoscale import AddReplicas, Outside, RemoveReplica, Step, Usage, rescale
from kvloom.cluster.policies.dispatch import pair
from kvloom.engine.freeness import Thresholds, freeness, virtual_usage
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.service import FleetState, Pair, Pairs, Steps, UnitGroup

T = TypeVar("T")
Measure = Callable[[UnitLoad], float]


@dataclass(frozen=True, slots=True)
class Period:
    """The decisions of one period. Nothing else is kept from period to period: a scheduler that starts anew
    begins with `Period()`."""

    pairs: tuple[Pair, ...] = ()
    outside: Mapping[str, Outside] = field(default_factory=dict)
    steps: Mapping[str, Step] = field(default_factory=dict)
    """The steps of those groups whose number of replicas changes, by group."""


def decide(
    loads: Mapping[str, UnitLoad],
    last: Period,
    now: float,
    thresholds: Thresholds,
    groups: Mapping[str, UnitGroup] | None = None,
    waiting: Mapping[str, int] | None = None,
    usage: Usage = virtual_usage,
    measure: Measure = freeness,
) -> Period:
    """Returns the decisions of the next period. loads: those of the units that have reported, as the others
    take no part; now: the time in seconds; waiting: the number of requests that no unit can answer yet, by
    model, for which the first group that serves the model and can start a unit does so; usage: the measure by
    which the number of replicas follows; measure: of freeness, by which units are paired."""
    free = {name: measure(load) for name, load in loads.items()}
    outside: dict[str, Outside] = {}
    steps: dict[str, Step] = {}
    wanted = {model for model, count in (waiting or {}).items() if count}
    for name, group in (groups or {}).items():
        own = {unit: loads[unit] for unit in group.units if unit in loads}
        waits = not wanted.isdisjoint(group.models)
        watched, step = rescale(
            own,
            group.starting,
            last.outside.get(name),
            now,
            group.scale,
            waits=waits,
            idle=group.idle,
            usage=usage,
        )
        if watched:
            outside[name] = watched
        if step:
            steps[name] = step
        if group.starting or (isinstance(step, AddReplicas) and group.away):
            wanted -= group.models
    return Period(pair(loads, free, last.pairs, thresholds), outside, steps)


def carried_out(steps: Mapping[str, Step], groups: Mapping[str, UnitGroup]) -> Steps:
    """Returns the units that the steps start and stop. Units that cannot be started now are left out: the
    next period asks anew."""
    return Steps(
        start=tuple(
            unit
            for name, step in steps.items()
            if isinstance(step, AddReplicas)
            for unit in groups[name].away[: step.count]
        ),
        stop=tuple(step.unit for step in steps.values() if isinstance(step, RemoveReplica)),
    )


STANDS: Final = 3  # periods for which pairs stand if no others are told

_log = logging.getLogger(__name__)


class FleetControl(Protocol):
    """A gateway, which carries out the decisions. Raises KvloomError if it cannot be reached."""

    async def state(self) -> FleetState: ...

    async def pair(self, pairs: Pairs) -> None: ...

    async def scale(self, steps: Steps) -> None:
        """Begins to start and stop units; the next states tell the result."""


class EveryGateway:
    """Satisfies `FleetControl` with all gateways of a fleet. Each knows the same units; the requests that
    wait and those that have run are its own."""

    def __init__(self, gateways: Callable[[], Sequence[FleetControl]]) -> None:
        """gateways: returns the present gateways, in the order in which they are asked to scale."""
        self._gateways = gateways

    async def state(self) -> FleetState:
        """Raises what the first gateway did if none answers."""
        states = await self._all([one.state() for one in self._gateways()])
        return merged([one for one in states if one is not None], whole=None not in states)

    async def pair(self, pairs: Pairs) -> None:
        """Tells all, and each moves the requests that are its own."""
        await self._all([one.pair(pairs) for one in self._gateways()])

    async def scale(self, steps: Steps) -> None:
        """Tells the first that can be reached: it edits what all share."""
        problem: KvloomError = Unavailable("there is no gateway")
        for one in self._gateways():
            try:
                return await one.scale(steps)
            except KvloomError as error:
                problem = error
        raise problem

    async def _all(self, asked: Sequence[Awaitable[T]]) -> list[T | None]:
        """Returns the answers, None for those that failed. Raises what the first one did if all have."""
        answers = await asyncio.gather(*asked, return_exceptions=True)
        problems = [one for one in answers if isinstance(one, BaseException)]
        for problem in problems:
            if len(problems) == len(answers) or not isinstance(problem, KvloomError):
                raise problem
        if not answers:
            raise Unavailable("there is no gateway")
        return [None if isinstance(one, BaseException) else one for one in answers]


def merged(states: Sequence[FleetState], *, whole: bool = True) -> FleetState:
    """Returns the state of a fleet of which each gateway has told its own. Requests that wait are summed, and
    a group is idle since its last request at any of them. whole: whether all have told; if not, no group
    counts as idle."""
    first = states[0]
    waiting = Counter[str]()
    loads: dict[str, UnitLoad] = {}
    for state in states:
        waiting.update(state.waiting)
        loads = state.loads | loads
    groups = {
        name: replace(
            group,
            idle=min(one.groups[name].idle for one in states if name in one.groups) if whole else 0.0,
        )
        for name, group in first.groups.items()
    }
    return FleetState(loads=loads, waiting=dict(waiting), groups=groups)


class FleetScheduler:
    """Keeps nothing but the last period, so that a scheduler that starts anew goes on from there."""

    def __init__(
        self,
        fleet: FleetControl,
        clock: Clock,
        *,
        period: float = 0.5,
        thresholds: Thresholds | None = None,
        usage: Usage | None = None,
        measure: Measure = freeness,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._period = period
        self._thresholds = thresholds or Thresholds()
        self._usage = usage or virtual_usage
        self._measure = measure
        self._last = Period()
        self._reached = True

    async def run(self) -> None:
        """Works until it is cancelled. A fleet that cannot be reached is asked again a period later."""
        while True:
            began = self._clock.now()
            try:
                await self.step()
            except KvloomError as error:
                if self._reached:
                    _log.warning("%s; nothing moves meanwhile", error.message)
                self._reached = False
            else:
                self._reached = True
            await self._clock.sleep(max(0.0, began + self._period - self._clock.now()))

    async def step(self) -> Period:
        """Decides and carries out one period."""
        state = await self._fleet.state()
        now, last, thresholds = self._clock.now(), self._last, self._thresholds
        self._last = decide(
            *(state.loads, last, now, thresholds, state.groups, state.waiting),
            usage=self._usage,
            measure=self._measure,
        )
        pairs, floor = self._last.pairs, self._thresholds.kept
        paired = {unit for one in pairs for unit in (one.source, one.destination)}
        free = {unit: one if isfinite(one := self._measure(state.loads[unit])) else None for unit in paired}
        await self._fleet.pair(Pairs(pairs=pairs, seconds=STANDS * self._period, floor=floor, freeness=free))
        steps = carried_out(self._last.steps, state.groups)
        if steps.start or steps.stop:
            await self._fleet.scale(steps)
        return self._last
