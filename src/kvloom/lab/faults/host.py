"""A unit's place in a run with faults: an engine that dies with all it knows, and another one after it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

from kvloom.engine.engine import Engine
from kvloom.lab.faults.faults import FaultSource
from kvloom.lab.faults.guides import guided_card
from kvloom.lab.faults.invariants import InvariantChecker, LentArena, split_job
from kvloom.lab.faults.journal import Crashed, FaultTasks, Journal
from kvloom.lab.sim.executor import Content, EvenlyOperated, JobFailed, ModelledExecutor
from kvloom.lab.sim.links import ModelledPlane, ModelledTransport, TimedLink
from kvloom.lab.sim.offload import OffloadingUnits, SimulatedLenderClient, SimulatedOffloadBackend
from kvloom.lab.sim.unit import SimulatedUnit, modelled_executor
from kvloom.offload.loans import LoanKeeper
from kvloom.types.clock import Clock
from kvloom.types.errors import Unavailable
from kvloom.types.job import Job
from kvloom.types.spec import EngineSpec, WeaveSpec


class WatchedDevice:
    """Satisfies `Content`: a checker. Where the seed has it, a job fails: at its end, with all written, or,
    if peers wait for its layers, after some of them."""

    def __init__(self, unit: str, checker: InvariantChecker, faults: FaultSource, journal: Journal) -> None:
        self._unit = unit
        self._checker = checker
        self._faults = faults
        self._journal = journal
        self._doomed: set[int] = set()  # by id; while they run
        self.backend: SimulatedOffloadBackend | None = None  # of a unit that lends or borrows

    def begin(self, job: Job) -> None:
        self._tell(job, "begins, share", job.share)
        self._journal.count("jobs")
        if self._faults.fails():
            self._doomed.add(id(job))
        self._checker.begin(job)
        if job.offloaded is not None and (away := self._away(job.model)) is not None:
            self._checker.move(job, away)

    def write(self, job: Job, layers: range) -> None:
        if id(job) in self._doomed and layers.start > 0:
            self._fail(job)
        if job.offloaded is None:
            self._checker.write(job, layers)
            return
        home, rest = split_job(job)
        self._checker.write(home, layers)
        if (away := self._away(job.model)) is not None:
            away.write(rest, layers)

    def draw(self, job: Job, step: int) -> list[int]:
        if id(job) in self._doomed:
            self._fail(job)
        tokens = self._draw(job, step)
        self._tell(job, "ends:", tokens)
        return tokens

    def _draw(self, job: Job, step: int) -> list[int]:
        """Offloaded rows that do not count get any token."""
        if job.offloaded is None:
            return self._checker.draw(job, step)
        self._journal.count("steps offloaded")
        home, rest = split_job(job)
        away = self._away(job.model)
        if away is None:
            self._journal.count("offloaded steps lost")
        return [
            *self._checker.draw(home, step),
            *(away.draw(rest, step) if away else [0] * len(rest.samples)),
        ]

    def _away(self, model: str) -> InvariantChecker | None:
        """Returns the checker of what the model has in a loan's blocks; None if the loan is over."""
        found = self.backend.lent_blocks(model) if self.backend else None
        if found is None:
            return None
        lender, blocks = found
        arena = lender.transport.arena
        assert arena is not None
        return self._checker.offloaded(LentArena(arena, blocks))

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
        self,
        engine: Engine,
        executor: ModelledExecutor,
        transport: ModelledTransport,
        crashed: Crashed,
        backend: SimulatedOffloadBackend | None = None,
    ) -> None:
        """backend: of a unit that lends or borrows."""
        self.engine = engine
        self.executor = executor
        self.transport = transport
        self.backend = backend
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = FaultTasks(crashed)
        self.running = self._tasks.spawn(engine.run())

    def serve(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a call, which ends with the process."""
        return self._tasks.spawn(call)

    def end(self) -> None:
        self.over.set_result(None)
        self.executor.halt()
        if self.backend is not None:
            self.backend.die()
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
        offloading: OffloadingUnits | None = None,
        lenders: Mapping[str, FaultyUnit] | None = None,
    ) -> None:
        """offloading: the units that lend and borrow. lenders: all units, by name."""
        self._offloading = offloading
        self._lenders = {} if lenders is None else lenders
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
        vocab = next(iter(unit.shapes.values())).vocab
        others = unit.cost.shapes.values() if isinstance(unit.cost, EvenlyOperated) else ()
        width = max((shape.geometry(spec.block_bytes).tokens_per_block for shape in others), default=0)
        checker = InvariantChecker(geometries, blocks, vocab, width=width)
        self.checkers.append(checker)
        device = self._device(checker)
        executor = modelled_executor(unit, device)
        executor.cards = {name: guided_card(card) for name, card in executor.cards.items()}
        link = TimedLink(unit.bandwidth, LATENCY)
        transport = self._plane.join(self.name, blocks, link, arena=checker.arena)
        backend = self._offloading.backend(unit, executor, transport) if self._offloading else None
        if isinstance(device, WatchedDevice):
            device.backend = backend
        engine = Engine(executor, transport, spec, self._clock, backend)
        self.process = EngineProcess(engine, executor, transport, self._crashed, backend)
        if spec.weave is not None:
            self.process.serve(self._borrow(engine, spec, spec.weave))
        self._journal("engine", self.name, "starts,", blocks, "blocks")

    async def _borrow(self, engine: Engine, spec: EngineSpec, weave: WeaveSpec) -> None:
        """Keeps the unit's model in a loan for as long as the process lives."""

        def reach() -> Engine:
            lender = self._lenders[weave.cold].process
            if lender is None:
                raise Unavailable(f"{weave.cold} has no process", retry_after=1)
            return lender.engine

        client = SimulatedLenderClient(reach, self._clock, LATENCY)
        await LoanKeeper(engine.borrower, spec.models[0].name, weave, client, self._clock).run()

    def _device(self, checker: InvariantChecker) -> Content:
        return WatchedDevice(self.name, checker, self._faults, self._journal)

    def kill(self) -> None:
        """Ends the process at once. What its tasks still tidy up reaches nobody."""
        gone = self.process
        if gone is not None:
            self._journal("engine", self.name, "dies")
            self._out(gone)

    async def stop(self) -> None:
        """Ends the process as a request does: what it has ends with an error, and it takes no more."""
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
        if self._offloading is not None:
            self._offloading.forget(gone.transport)
        gone.end()
