"""Which of a fleet's units weave in virtual time, and how they ask each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvloom.core.clock import Clock
from kvloom.core.errors import ConfigError
from kvloom.core.load import UnitLoad
from kvloom.core.spec import EngineSpec
from kvloom.core.weaving import Borrow, Loan
from kvloom.cost.operators import Operated
from kvloom.engine.engine import Engine
from kvloom.sim.executor import ModelledExecutor
from kvloom.sim.links import ModelledTransport
from kvloom.sim.unit import SimulatedUnit
from kvloom.sim.weaving import ModelledWeaver


class Loom:
    """A fleet's units that weave. weavers: of engines, by their endpoint's `where`."""

    def __init__(self, specs: Iterable[EngineSpec]) -> None:
        self.weavers: dict[bytes, ModelledWeaver] = {}
        pairs = [(spec.unit, spec.weave.cold) for spec in specs if spec.weave]
        self._units = {name for pair in pairs for name in pair}

    def weaver(
        self, unit: SimulatedUnit, executor: ModelledExecutor, transport: ModelledTransport
    ) -> ModelledWeaver | None:
        """None where the unit takes no part. Raises ConfigError where it cannot be known what it costs."""
        name = unit.spec.unit
        if name not in self._units:
            return None
        if not isinstance(unit.cost, Operated):
            raise ConfigError(
                f"{name}: weave: operators of its device are not known; the roofline knows some"
            )
        made = ModelledWeaver(self.weavers, executor, transport, unit.cost, unit.bandwidth)
        self.weavers[transport.endpoint.where] = made
        return made

    def forget(self, transport: ModelledTransport) -> None:
        """Its engine has ended."""
        self.weavers.pop(transport.endpoint.where, None)


class LenderWire:
    """What a unit that borrows asks another. reach: that one's engine; raises Unavailable where it has none.
    delay: seconds of one way."""

    def __init__(self, reach: Callable[[], Engine], clock: Clock, delay: float) -> None:
        self._reach = reach
        self._clock = clock
        self._delay = delay

    async def load(self) -> UnitLoad:
        await self._clock.sleep(self._delay)
        load = await self._reach().load()
        await self._clock.sleep(self._delay)
        return load

    async def lend(self, body: Borrow) -> Loan:
        await self._clock.sleep(self._delay)
        loan = await self._reach().lend(body)
        await self._clock.sleep(self._delay)
        return loan
