"""The fleet scheduler: looks at all units once a period, and says between which of them requests move, and
which are to come and to go (Llumnix, section 4.2)."""

from __future__ import annotations

import logging
from typing import Final, Protocol

from kvloom.core.clock import Clock
from kvloom.core.errors import KvloomError
from kvloom.core.replicas import Steps
from kvloom.core.rescheduling import FleetState, Pairs
from kvloom.fleet.period import Period, carried_out, decide
from kvloom.fleet.scaling import Usage
from kvloom.fleet.thresholds import Thresholds
from kvloom.fleet.usage import virtual_usage

STANDS: Final = 3  # periods for which pairs stand where no others are told

_log = logging.getLogger(__name__)


class FleetControl(Protocol):
    """Who carries out what is decided: a gateway. Raises KvloomError where it cannot be reached."""

    async def state(self) -> FleetState: ...

    async def pair(self, pairs: Pairs) -> None: ...

    async def scale(self, steps: Steps) -> None:
        """Begin to; what comes of it the next states tell."""


class FleetScheduler:
    """Knows nothing but the last period, so that one which starts anew goes on where another has ended.
    period: seconds. usage: by which the number of replicas follows."""

    def __init__(
        self,
        fleet: FleetControl,
        clock: Clock,
        *,
        period: float = 0.5,
        thresholds: Thresholds | None = None,
        usage: Usage | None = None,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._period = period
        self._thresholds = thresholds or Thresholds()
        self._usage = usage or virtual_usage
        self._last = Period()
        self._reached = True

    async def run(self) -> None:
        """Until it is cancelled. Where the fleet cannot be reached it is asked again a period later."""
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
        """One period."""
        state = await self._fleet.state()
        now, last, thresholds = self._clock.now(), self._last, self._thresholds
        self._last = decide(
            state.loads, last, now, thresholds, state.groups, state.waiting, usage=self._usage
        )
        pairs, floor = self._last.pairs, self._thresholds.kept
        await self._fleet.pair(Pairs(pairs=pairs, seconds=STANDS * self._period, floor=floor))
        steps = carried_out(self._last.steps, state.groups)
        if steps.start or steps.stop:
            await self._fleet.scale(steps)
        return self._last
