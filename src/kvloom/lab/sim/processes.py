"""The processes of a fleet in virtual time: each unit's place for one, the wire to it, and the launcher that
starts and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from kvloom.cluster.launcher import Answered, Ended, FoundProcess, News, NodeReport, Report
from kvloom.cluster.state import gateway_name
from kvloom.engine.engine import Engine
from kvloom.engine.freeness import freeness
from kvloom.journal.log import Journal
from kvloom.journal.records import nobody
from kvloom.lab.sim.cpu import EngineCpu, SimulatedCpu
from kvloom.lab.sim.executor import ModelledExecutor, ModelledWeights
from kvloom.lab.sim.links import Link, ModelledPlane, ModelledTransport
from kvloom.lab.sim.offload import OffloadingUnits, SimulatedOffloadBackend
from kvloom.lab.sim.unit import SimulatedUnit, modelled_executor
from kvloom.offload.loan_manager import LoanManager
from kvloom.offload.terms import LEND, TAKE_BACK, Borrow, HandBack, Loan
from kvloom.types.clock import Clock
from kvloom.types.errors import Unavailable
from kvloom.types.request import Event, StartGenerate
from kvloom.types.spec import EngineSpec, WeaveSpec
from kvloom.types.transfer import NoTransport
from kvloom.types.verbs import Answer, Body, RemoteEngine, Verb

T = TypeVar("T")

GATEWAY_NAME: Final = gateway_name(1)

Crashed = Callable[[BaseException], None]
"""Called with the error of a task that nobody else hears of."""


class ProcessTasks:
    """The tasks of one process, which end with it."""

    def __init__(self, crashed: Crashed, expected: tuple[type[Exception], ...] = ()) -> None:
        """expected: errors of which `crashed` is not told."""
        self._crashed = crashed
        self._expected = expected
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._cancelled = False

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancels all tasks, in the order in which they began. Nobody is told of what they still fail of."""
        self._cancelled = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._cancelled and not isinstance(error, self._expected):
            self._crashed(error)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One engine from its start to its end."""

    engine: Engine
    executor: ModelledExecutor
    transport: ModelledTransport
    backend: SimulatedOffloadBackend | None
    """None if the unit neither lends nor borrows."""
    cpu: EngineCpu | None
    """The engine's loop and what slows its jobs; None if only jobs take time."""
    tasks: ProcessTasks
    running: asyncio.Task[None]
    """The engine's loop."""
    ended: asyncio.Future[None]
    """Done when the process ends, whatever its tasks still tidy up."""

    def end(self) -> None:
        self.ended.set_result(None)
        self.executor.halt()
        if self.backend is not None:
            self.backend.die()
        if self.cpu is not None:
            self.cpu.leave()
        self.tasks.cancel()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The surroundings that all units of a fleet have in common."""

    clock: Clock
    offloading: OffloadingUnits
    crashed: Crashed
    """Called with the error of an engine's task."""
    delay: float
    """Seconds that a call from one unit to another takes one way."""
    link: Callable[[SimulatedUnit], Link]
    """Returns a unit's way out."""
    cpu: SimulatedCpu | None = None
    """The CPU that all units share; None if only jobs take time."""
    plane: ModelledPlane = field(default_factory=ModelledPlane)
    journal: Journal | None = None
    """Takes what units decide."""
    hosts: dict[str, UnitHost] = field(default_factory=dict)
    """The units by name, which borrow of each other."""


class UnitHost:
    """A unit's place in the fleet, in which one process may follow another."""

    def __init__(self, unit: SimulatedUnit, around: Surroundings) -> None:
        self.name = unit.spec.unit
        self.unit = unit
        self.process: EngineProcess | None = None
        """None while there is none."""
        self.weights: list[ModelledWeights] = []
        """The weights of all its processes up to now, if they sleep."""
        self._around = around

    @property
    def reached(self) -> EngineProcess:
        """Returns the process. Raises Unavailable if there is none."""
        if self.process is None:
            raise Unavailable(f"{self.name} has no process", retry_after=1)
        return self.process

    def start(self) -> None:
        """Gives the unit a process at once."""
        unit, spec, around = self.unit, self.unit.spec, self._around
        cpu = EngineCpu(around.cpu, unit.engine_gap) if around.cpu else None
        executor = self._executor(cpu)
        if executor.weights is not None:
            self.weights.append(executor.weights)
        transport = around.plane.join(self.name, executor.blocks, around.link(unit))
        backend = around.offloading.backend(unit, executor, transport)
        plane = transport if spec.abilities.moves else NoTransport(self.name)
        record = nobody if around.journal is None else partial(around.journal.add, self.name)
        engine = Engine(executor, plane, spec, around.clock, backend, record=record)
        tasks, ended = ProcessTasks(around.crashed), asyncio.get_running_loop().create_future()
        running = tasks.spawn(engine.run())
        self.process = EngineProcess(engine, executor, transport, backend, cpu, tasks, running, ended)
        if spec.weave is not None:
            tasks.spawn(self._borrow(engine, spec.models[0].name, spec.weave))

    def _executor(self, cpu: EngineCpu | None) -> ModelledExecutor:
        return modelled_executor(self.unit, self.unit.content, cpu)

    async def _borrow(self, engine: Engine, model: str, weave: WeaveSpec) -> None:
        """Keeps the unit's model in a loan for as long as the process lives."""
        around = self._around
        lenders = {cold: ModelledWire(around.hosts[cold], around.clock, around.delay) for cold in weave.colds}
        await LoanManager(engine.borrower, model, weave, lenders, around.clock, freeness).run()

    def kill(self) -> None:
        """Ends the process at once. What its tasks still tidy up reaches nobody."""
        if self.process is not None:
            self._out(self.process)

    async def stop(self) -> None:
        """Ends the process as a request does: what it has ends with an error, and it takes no more."""
        gone = self.process
        if gone is not None:
            gone.engine.stop()
            await asyncio.wait([gone.running])
            if self.process is gone:
                self._out(gone)

    def _out(self, gone: EngineProcess) -> None:
        self.process = None
        self._around.plane.kill(gone.transport)
        self._around.offloading.forget(gone.transport)
        gone.end()


class ModelledWire(RemoteEngine):
    """Satisfies `EngineClient` and `LenderClient`: calls go straight to the process that the unit has when
    they arrive. A stream's frames take no time, so that they keep their distances; its first one has both
    ways behind it."""

    def __init__(self, host: UnitHost, clock: Clock, delay: float, *, through_loop: bool = False) -> None:
        """delay: seconds of one way. through_loop: whether the engine's own work counts. Then a request and
        its frames wait for the engine's loop, and the wire takes no time, because that is in what
        both ends were measured to do."""
        self._host = host
        self._clock = clock
        self._delay = delay
        self._through_loop = through_loop

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        await self._clock.sleep(self._delay)
        answer = await verb.ask(self._host.reached.engine, body)
        await self._clock.sleep(self._delay)
        return answer

    async def lend(self, body: Borrow) -> Loan:
        return await self.call(LEND, body)

    async def take_back(self, body: HandBack) -> None:
        await self.call(TAKE_BACK, body)

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        cpu = self._host.reached.cpu if self._through_loop else None
        if cpu is None:
            await self._clock.sleep(2 * self._delay)
            async with aclosing(self._frames(body)) as frames:
                async for frame in frames:
                    yield frame
            return
        await cpu.loop.take_request(len(body.prompt))
        async with aclosing(self._frames(body)) as frames:
            async for frame in frames:
                if frame:
                    await cpu.loop.passed()
                yield frame

    def _frames(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        """Returns the stream of the process that the unit has now. Raises Unavailable if there is none."""
        process = self._host.reached
        if process.executor.weights is not None:
            process.executor.weights.asked(body.model)
        return process.engine.start_generate(body)


class Census:
    """Counts the units that have a process, over time: the least, the most and the mean. Those of the
    beginning come all at once."""

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


class ModelledLauncher:
    """Satisfies `Launcher`: engines in virtual time, and one gateway that is there from the beginning."""

    def __init__(self, hosts: Mapping[str, UnitHost], clock: Clock, tasks: ProcessTasks) -> None:
        """tasks: holds the tasks that the launcher waits for."""
        self.census = Census(clock)
        """Counts the units that have a process, or are about to."""
        self.hear: Callable[[Report | NodeReport], None] = lambda report: None
        """Called with each report of a process; the controller sets it."""
        self.told: Callable[[News], None] = lambda news: None
        """Called with each piece of news for the gateway; its mirror sets it."""
        self._hosts = hosts
        self._clock = clock
        self._tasks = tasks
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._preempted = 0  # by engines that have ended

    @property
    def engines(self) -> dict[str, Engine]:
        """Returns the engines that run now, by unit."""
        return {name: host.process.engine for name, host in self._hosts.items() if host.process is not None}

    def begin(self, names: Collection[str]) -> None:
        """Gives these units a process at once."""
        for name in names:
            self.census.more()
            self._hosts[name].start()

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        """Begins a start, which is over once the unit's models would be loaded."""
        if engine is not None:
            self._starts[component] = self._tasks.spawn(self._start(component, engine))

    def stop(self, component: str) -> None:
        if self._hosts[component].process is not None:
            self._tasks.spawn(self._stop(component))
        elif component in self._starts:
            self._call_off(component)

    def _call_off(self, component: str) -> None:
        self._starts[component].cancel()

    def kill(self, component: str) -> None:
        """Does nothing: a process that was told to end does so here once its jobs have."""

    def discard(self, node: str, component: str) -> None:
        """Does nothing: there are no other nodes."""

    def retire(self, component: str) -> None:
        """Does nothing: the gateway has no successor."""

    def tell(self, component: str, news: News) -> None:
        self.told(news)

    def forget(self, component: str) -> None:
        """Does nothing: no component is kept here."""

    def running(self) -> Sequence[FoundProcess]:
        return [FoundProcess(name, 1, "ready") for name in (*self.engines, GATEWAY_NAME)]

    async def _start(self, name: str, engine: EngineSpec) -> None:
        host = self._hosts[name]
        self.census.more()
        try:
            await self._load(host, engine)
        except asyncio.CancelledError:
            self.census.less()
            self._tell_end(Ended(name, "was stopped as it started"))
            raise
        finally:
            del self._starts[name]
        host.start()
        self.hear(Answered(name))

    async def _load(self, host: UnitHost, engine: EngineSpec) -> None:
        """Waits until the unit's models are loaded."""
        await self._clock.sleep(host.unit.start)

    async def _stop(self, name: str) -> None:
        host = self._hosts[name]
        gone = host.process
        await host.stop()
        if gone is not None:
            self._preempted += await _preemptions(gone.engine)
        self.census.less()
        self._tell_end(Ended(name, "ended with exit code 0"))

    def _tell_end(self, ended: Ended) -> None:
        self.hear(ended)

    async def end(self) -> None:
        """Ends all processes, each once its jobs have ended."""
        for starting in self._starts.values():
            starting.cancel()
        await asyncio.gather(*(host.stop() for host in self._hosts.values()))

    @property
    def weights(self) -> list[ModelledWeights]:
        """Returns the weights that sleep, of all processes up to now."""
        return [weights for host in self._hosts.values() for weights in host.weights]

    async def preemptions(self) -> int:
        """Returns the preemptions so far, by all engines that there were."""
        return self._preempted + sum([await _preemptions(engine) for engine in self.engines.values()])


async def _preemptions(engine: Engine) -> int:
    load = await engine.load()
    return sum(model.preemptions_total for model in load.models.values())
