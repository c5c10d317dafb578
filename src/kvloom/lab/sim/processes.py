"""The engines of a fleet in virtual time: which units have one, and how they come by it and lose it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvloom.engine.engine import Engine
from kvloom.lab.sim.hosting import HostedMachine, HostedUnit, HostedWire, Worker
from kvloom.lab.sim.links import Link, ModelledPlane, ModelledTransport
from kvloom.lab.sim.offload import OffloadingUnits, SimulatedLenderClient
from kvloom.lab.sim.unit import SimulatedUnit, modelled_executor
from kvloom.lab.sim.wire import ModelledWire
from kvloom.offload.loans import LoanKeeper
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import Unavailable
from kvloom.types.request import ModelCard
from kvloom.types.spec import EngineSpec, WeaveSpec
from kvloom.types.transfer import NoTransport


class Census:
    """least, most: that there have been; those of the beginning come all at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._since = clock.now()
        self._count = 0
        self._seconds = 0.0  # of all units together, up to `since`
        self._least: int | None = None
        self._most = 0

    @property
    def least(self) -> int:
        return self._count if self._least is None else min(self._least, self._count)

    @property
    def most(self) -> int:
        return max(self._most, self._count)

    @property
    def mean(self) -> float:
        """Up to now."""
        self._pass()
        seconds = self._since - self._began
        return self._seconds / seconds if seconds > 0 else float(self._count)

    def more(self) -> None:
        self._change(1)

    def less(self) -> None:
        self._change(-1)

    def _change(self, by: int) -> None:
        self._pass()
        self._count += by

    def _pass(self) -> None:
        """What there is has been there up to now; what lasted no time at all does not count."""
        now = self._clock.now()
        if now > self._since:
            self._seconds += self._count * (now - self._since)
            self._since = now
            self._least = self.least
            self._most = self.most


@dataclass(frozen=True, slots=True)
class Process:
    """One engine from its start to its end. host: where its own work counts. borrowing: of who borrows."""

    engine: Engine
    transport: ModelledTransport
    host: HostedUnit | None
    running: asyncio.Task[None]
    borrowing: asyncio.Task[None] | None

    async def stop(self) -> None:
        await self.engine.stop()
        if self.borrowing is not None:
            self.borrowing.cancel()


class ModelledProcesses:
    """Satisfies the roster's `Processes`. tasks: of the engines that run. delay: of the wire, in seconds, one
    way. link: a unit's way out. machine: what all units run on, where its own work counts. census: of units
    that have a process, or are about to."""

    def __init__(
        self,
        units: Mapping[str, SimulatedUnit],
        clock: Clock,
        tasks: asyncio.TaskGroup,
        *,
        delay: float,
        link: Callable[[SimulatedUnit], Link],
        machine: HostedMachine | None,
    ) -> None:
        self.census = Census(clock)
        self._units = units
        self._clock = clock
        self._tasks = tasks
        self._delay = delay
        self._link = link
        self._machine = machine
        self._plane = ModelledPlane()
        self._offloading = OffloadingUnits(unit.spec for unit in units.values())
        self._processes: dict[str, Process] = {}
        self._preempted = 0  # by engines that have ended

    @property
    def engines(self) -> dict[str, Engine]:
        """By unit, those that run now."""
        return {name: process.engine for name, process in self._processes.items()}

    def begin(self, names: Collection[str]) -> None:
        """These have a process at once."""
        for name in names:
            self.census.more()
            self._launch(name)

    async def start(self, spec: EngineSpec) -> None:
        """Takes as long as the unit's model has to be loaded."""
        self.census.more()
        try:
            await self._clock.sleep(self._units[spec.unit].start)
        except asyncio.CancelledError:
            self.census.less()
            raise
        self._launch(spec.unit)

    async def stop(self, unit: str, cards: Sequence[ModelCard]) -> None:
        process = self._processes[unit]
        await process.stop()
        await asyncio.wait([process.running])
        self._preempted += await _preemptions(process.engine)
        self._plane.kill(process.transport)
        self._offloading.forget(process.transport)
        if process.host is not None:
            process.host.leave()
        del self._processes[unit]
        self.census.less()

    def forget(self, unit: str) -> None:
        """It has no process, and nobody keeps its cards."""

    async def end(self) -> None:
        """Of all that run; their loops end when their jobs have."""
        for process in self._processes.values():
            await process.stop()

    async def preemptions(self) -> int:
        """So far, by all engines that there were."""
        return self._preempted + sum([await _preemptions(engine) for engine in self.engines.values()])

    async def client(self, unit: str) -> EngineClient:
        """Of whatever engine the unit has when it is called."""

        def reach() -> Engine:
            return self._reached(unit).engine

        def loop() -> Worker:
            host = self._reached(unit).host
            assert host is not None
            return host.loop

        if self._machine is None:
            return ModelledWire(reach, self._clock, self._delay)
        return HostedWire(reach, self._clock, self._delay, loop)

    def _launch(self, name: str) -> None:
        unit = self._units[name]
        host = self._machine.unit(unit.overhead) if self._machine else None
        executor = modelled_executor(unit, host=host)
        transport = self._plane.join(name, executor.blocks, self._link(unit))
        offload = self._offloading.backend(unit, executor, transport)
        whole = unit.spec.tensor_parallel == 1
        engine = Engine(executor, transport if whole else NoTransport(name), unit.spec, self._clock, offload)
        running, weave = self._tasks.create_task(engine.run()), unit.spec.weave
        borrowing = self._tasks.create_task(self._borrow(engine, unit.spec, weave)) if weave else None
        self._processes[name] = Process(engine, transport, host, running, borrowing)

    async def _borrow(self, engine: Engine, spec: EngineSpec, weave: WeaveSpec) -> None:
        """For ever."""
        lender = SimulatedLenderClient(lambda: self._reached(weave.cold).engine, self._clock, self._delay)
        await LoanKeeper(engine.borrower, spec.models[0].name, weave, lender, self._clock).run()

    def _reached(self, unit: str) -> Process:
        process = self._processes.get(unit)
        if process is None:
            raise Unavailable(f"{unit} has no process", retry_after=1)
        return process


async def _preemptions(engine: Engine) -> int:
    load = await engine.load()
    return sum(model.preemptions_total for model in load.models.values())
