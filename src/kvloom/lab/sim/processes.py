"""The engines of a fleet in virtual time: which units have one, and how they come by it and lose it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvloom.cluster.launcher import Answered, Ended, FoundProcess, News, Report
from kvloom.cluster.state import gateway_name
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
        """Returns the mean number up to now."""
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
        """Counts what there has been up to now. What lasted no time at all does not count."""
        now = self._clock.now()
        if now > self._since:
            self._seconds += self._count * (now - self._since)
            self._since = now
            self._least = self.least
            self._most = self.most


GATEWAY_NAME: Final = gateway_name(1)


@dataclass(frozen=True, slots=True)
class SimulatedProcess:
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


class ModelledLauncher:
    """Satisfies `Launcher`: engines in virtual time, and one gateway that is there from the beginning."""

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
        """tasks: of the engines that run. delay: of the wire, in seconds, one way. link: a unit's way out.
        machine: what all units run on, if its own work counts."""
        self.census = Census(clock)
        """Counts the units that have a process, or are about to."""
        self.hear: Callable[[Report], None] = lambda report: None
        """Called with what happens to a process: the controller's."""
        self.told: Callable[[News], None] = lambda news: None
        """Called with what the gateway is told: its mirror's."""
        self._units = units
        self._clock = clock
        self._tasks = tasks
        self._delay = delay
        self._link = link
        self._machine = machine
        self._plane = ModelledPlane()
        self._offloading = OffloadingUnits(unit.spec for unit in units.values())
        self._processes: dict[str, SimulatedProcess] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._preempted = 0  # by engines that have ended

    @property
    def engines(self) -> dict[str, Engine]:
        """Returns the engines that run now, by unit."""
        return {name: process.engine for name, process in self._processes.items()}

    def begin(self, names: Collection[str]) -> None:
        """Gives these units a process at once."""
        for name in names:
            self.census.more()
            self._launch(name)

    def start(self, component: str, generation: int, engine: EngineSpec | None) -> None:
        """Takes as long as the unit's model has to be loaded."""
        self._starts[component] = self._tasks.create_task(self._start(component))

    def stop(self, component: str) -> None:
        if component in self._processes:
            self._tasks.create_task(self._stop(component))
        elif starting := self._starts.get(component):
            starting.cancel()

    def kill(self, component: str) -> None:
        """Does nothing: engines here end by themselves once their jobs have."""

    def retire(self, component: str) -> None:
        """Does nothing: the gateway has no successor."""

    def tell(self, component: str, news: News) -> None:
        self.told(news)

    def forget(self, component: str) -> None:
        """Does nothing: no component is kept here."""

    def running(self) -> Sequence[FoundProcess]:
        return [FoundProcess(name, 1, "ready") for name in (*self._processes, GATEWAY_NAME)]

    async def _start(self, name: str) -> None:
        self.census.more()
        try:
            await self._clock.sleep(self._units[name].start)
        except asyncio.CancelledError:
            self.census.less()
            self.hear(Ended(name, "was stopped as it started"))
            raise
        finally:
            del self._starts[name]
        self._launch(name)
        self.hear(Answered(name))

    async def _stop(self, name: str) -> None:
        process = self._processes[name]
        await process.stop()
        await asyncio.wait([process.running])
        self._preempted += await _preemptions(process.engine)
        self._plane.kill(process.transport)
        self._offloading.forget(process.transport)
        if process.host is not None:
            process.host.leave()
        del self._processes[name]
        self.census.less()
        self.hear(Ended(name, "ended with exit code 0"))

    async def end(self) -> None:
        """Ends all that run; their loops end when their jobs have."""
        for starting in self._starts.values():
            starting.cancel()
        for process in self._processes.values():
            await process.stop()

    async def preemptions(self) -> int:
        """Returns the preemptions so far, by all engines that there were."""
        return self._preempted + sum([await _preemptions(engine) for engine in self.engines.values()])

    def client(self, unit: str) -> EngineClient:
        """Returns a client of whatever engine the unit has when it is called."""

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
        self._processes[name] = SimulatedProcess(engine, transport, host, running, borrowing)

    async def _borrow(self, engine: Engine, spec: EngineSpec, weave: WeaveSpec) -> None:
        """Keeps the unit's model in a loan for ever."""
        lender = SimulatedLenderClient(lambda: self._reached(weave.cold).engine, self._clock, self._delay)
        await LoanKeeper(engine.borrower, spec.models[0].name, weave, lender, self._clock).run()

    def _reached(self, unit: str) -> SimulatedProcess:
        process = self._processes.get(unit)
        if process is None:
            raise Unavailable(f"{unit} has no process", retry_after=1)
        return process


async def _preemptions(engine: Engine) -> int:
    load = await engine.load()
    return sum(model.preemptions_total for model in load.models.values())
