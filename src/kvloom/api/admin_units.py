"""Orders to a fleet's units: to serve, to come, to go or to start anew."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from kvloom.router.drains import Drains
from kvloom.router.rolling import Rolling
from kvloom.router.roster import Roster
from kvloom.types.service import Placement, UnitState
from kvloom.types.spec import EngineSpec


@dataclass(frozen=True, slots=True)
class UnitOrders:
    """Every order raises Conflict while another gateway is about to take over."""

    drains: Drains
    rolling: Rolling
    roster: Roster
    seconds: float
    """Time for what runs at a unit that is to stop, if an order does not say."""

    @property
    def placement(self) -> Placement:
        return self.roster.placement

    @property
    def states(self) -> list[UnitState]:
        return [self._named_models(state) for state in self.drains.states]

    def state(self, unit: str) -> UnitState:
        return self._named_models(self.drains.state(unit))

    async def drain(self, unit: str, seconds: float | None) -> UnitState:
        self.rolling.refuse_while_leaving()
        return self._named_models(await self.drains.drain(unit, seconds))

    async def restart(self, unit: str, seconds: float | None) -> UnitState:
        self.rolling.refuse_while_leaving()
        return self._named_models(await self.drains.restart(unit, seconds))

    async def stop(self, unit: str, seconds: float | None) -> UnitState:
        self.rolling.refuse_while_leaving()
        await self.roster.stop(unit, self.seconds if seconds is None else seconds)
        return self.state(unit)

    async def admit(self, unit: str) -> UnitState:
        self.rolling.refuse_while_leaving()
        return self._named_models(await self.drains.admit(unit))

    async def start(self, unit: str) -> UnitState:
        self.rolling.refuse_while_leaving()
        await self.roster.start(unit)
        return self.state(unit)

    async def remove(self, unit: str) -> UnitState:
        """Returns the unit's last state."""
        self.rolling.refuse_while_leaving()
        last = self.drains.state(unit)
        self.roster.remove(unit)
        return last

    async def add(self, spec: EngineSpec) -> UnitState:
        self.rolling.refuse_while_leaving()
        await self.roster.add(spec)
        return self.state(spec.unit)

    def _named_models(self, state: UnitState) -> UnitState:
        """Returns the state with the models that the unit is to serve, if it has told of none yet."""
        return state if state.models else replace(state, models=self.roster.models(state.name))
