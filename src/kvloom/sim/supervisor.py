"""Who gives units their processes in a run with faults, and outlives every gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from kvloom.core.clock import Clock
from kvloom.core.request import ModelCard
from kvloom.core.spec import EngineSpec
from kvloom.sim.crew import Crashed, Crew
from kvloom.sim.host import Host
from kvloom.sim.journal import Journal


class ModelledSupervisor:
    """Satisfies the roster's `Processes`, of whichever gateway serves. away: units that have no process to
    begin with, by what they serve as far as anyone knows. leaving: those that are to lose theirs, as the last
    gateway has said. told: called with the units that are away when one has ended."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        away: Collection[str],
        clock: Clock,
        journal: Journal,
        crashed: Crashed,
        told: Callable[[Collection[str]], None],
    ) -> None:
        self.away: dict[str, Sequence[ModelCard]] = dict.fromkeys(away, ())
        self.leaving: Mapping[str, float | None] = {}
        self._hosts = hosts
        self._clock = clock
        self._journal = journal
        self._told = told
        self._crew = Crew(crashed)
        self._stops: dict[str, asyncio.Task[None]] = {}

    def begin(self) -> None:
        for name in self._hosts:
            self.renew(name)

    def renew(self, unit: str) -> None:
        """It has a process again, if it is to have one."""
        if unit not in self.away and self._hosts[unit].process is None:
            self._hosts[unit].start()

    def leave(self, units: Mapping[str, float | None]) -> None:
        """These are to lose their process once they are empty."""
        self.leaving = units

    async def start(self, spec: EngineSpec) -> None:
        """Goes on where the gateway that has asked for it is lost."""
        self.away.pop(spec.unit, None)
        await asyncio.shield(self._crew.spawn(self._start(spec.unit)))

    async def stop(self, unit: str, cards: Sequence[ModelCard]) -> None:
        """As `start`."""
        self.away[unit] = cards
        if unit not in self._stops:
            self._stops[unit] = self._crew.spawn(self._stop(unit))
        await asyncio.shield(self._stops[unit])

    def forget(self, unit: str) -> None:
        """Nobody removes units here."""

    async def _start(self, unit: str) -> None:
        if ending := self._stops.get(unit):
            await asyncio.wait([ending])
        await self._clock.sleep(self._hosts[unit].unit.start)
        if unit not in self.away and self._hosts[unit].process is None:
            self._journal.count("units started")
        self.renew(unit)

    async def _stop(self, unit: str) -> None:
        self._journal.count("units ended")
        await self._hosts[unit].stop()
        del self._stops[unit]
        self._told(self.away.keys())
