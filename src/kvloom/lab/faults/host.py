"""A unit's place in a run with faults: an engine that dies with all it knows, and another one after it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from kvloom.engine.engine import Engine
from kvloom.lab.faults.faults import FaultSource
from kvloom.lab.faults.guides import guided_card
from kvloom.lab.faults.invariants import InvariantChecker
from kvloom.lab.faults.journal import Crashed, FaultTasks, Journal
from kvloom.lab.sim.executor import Content, JobFailed, ModelledExecutor
from kvloom.lab.sim.links import ModelledPlane, ModelledTransport, TimedLink
from kvloom.lab.sim.unit import SimulatedUnit, modelled_executor
from kvloom.types.clock import Clock
from kvloom.types.job import Job


class WatchedDevice:
    """Satisfies `Content`: a checker. Where the seed has it, a job fails: at its end, with all written, or,
    if peers wait for its layers, after some of them."""

    def __init__(self, unit: str, checker: InvariantChecker, faults: FaultSource, journal: Journal) -> None:
        self._unit = unit
        self._checker = checker
        self._faults = faults
        self._journal = journal
        self._doomed: set[int] = set()  # by id; while they run

    def begin(self, job: Job) -> None:
        self._tell(job, "begins, share", job.share)
        self._journal.count("jobs")
        if self._faults.fails():
            self._doomed.add(id(job))
        self._checker.begin(job)

    def write(self, job: Job, layers: range) -> None:
        if id(job) in self._doomed and layers.start > 0:
            self._fail(job)
        self._checker.write(job, layers)

    def draw(self, job: Job, step: int) -> list[int]:
        if id(job) in self._doomed:
            self._fail(job)
        tokens = self._checker.draw(job, step)
        self._tell(job, "ends:", tokens)
        return tokens

    def _fail(self, job: Job) -> None:
        self._doomed.remove(id(job))
        self._tell(job, "fails")
        self._journal.count("jobs failed")
        raise JobFailed("the seed has it so")

    def _tell(self, job: Job, *how: object) -> None:
        if not self._journal.kept:
            return
        plan = job.plan
        batch = [
            f"{sequence}[{start}:{start + new}]"
            for sequence, start, new in zip(plan.sequences, plan.starts, plan.appends, strict=True)
        ]
        self._journal("job", self._unit, job.phase.value, job.model, *batch, *how)


T = TypeVar("T")

LATENCY: Final = 1e-4  # seconds from one unit's memory to another's


class EngineProcess:
    """One engine from its start to its end. over: done at that end, whatever its tasks still tidy up.
    crashed: called with what it fails of until then."""

    def __init__(
        self, engine: Engine, executor: ModelledExecutor, transport: ModelledTransport, crashed: Crashed
    ) -> None:
        self.engine = engine
        self.executor = executor
        self.transport = transport
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = FaultTasks(crashed)
        self.running = self._tasks.spawn(engine.run())

    def serve(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """It ends with the process."""
        return self._tasks.spawn(call)

    def end(self) -> None:
        self.over.set_result(None)
        self.executor.halt()
        self._tasks.cancel()


class FaultyUnit:
    """process: None while there is none. checkers: of all its engines. crashed: called with what an engine
    failed of."""

    def __init__(
        self,
        unit: SimulatedUnit,
        plane: ModelledPlane,
        clock: Clock,
        faults: FaultSource,
        journal: Journal,
        crashed: Crashed,
    ) -> None:
        self.name = unit.spec.unit
        self.unit = unit
        self.process: EngineProcess | None = None
        self.checkers: list[InvariantChecker] = []
        self._plane = plane
        self._clock = clock
        self._faults = faults
        self._journal = journal
        self._crashed = crashed

    def start(self) -> None:
        unit, spec = self.unit, self.unit.spec
        blocks = spec.kv_bytes // spec.block_bytes
        geometries = {name: shape.geometry(spec.block_bytes) for name, shape in unit.shapes.items()}
        checker = InvariantChecker(geometries, blocks, next(iter(unit.shapes.values())).vocab)
        self.checkers.append(checker)
        executor = modelled_executor(unit, self._device(checker))
        executor.cards = {name: guided_card(card) for name, card in executor.cards.items()}
        link = TimedLink(unit.bandwidth, LATENCY)
        transport = self._plane.join(self.name, blocks, link, arena=checker.arena)
        engine = Engine(executor, transport, spec, self._clock)
        self.process = EngineProcess(engine, executor, transport, self._crashed)
        self._journal("engine", self.name, "starts,", blocks, "blocks")

    def _device(self, checker: InvariantChecker) -> Content:
        return WatchedDevice(self.name, checker, self._faults, self._journal)

    def kill(self) -> None:
        """Nothing of the process does anything any more. What its tasks still tidy up is their own."""
        gone = self.process
        if gone is not None:
            self._journal("engine", self.name, "dies")
            self._out(gone)

    async def stop(self) -> None:
        """As it ends when it is asked to: what it has ends with an error, and it takes no more."""
        gone = self.process
        if gone is not None:
            self._journal("engine", self.name, "stops")
            await gone.engine.stop()
            await asyncio.wait([gone.running])
            if self.process is gone:
                self._out(gone)

    def _out(self, gone: EngineProcess) -> None:
        self.process = None
        self._plane.kill(gone.transport)
        gone.end()
