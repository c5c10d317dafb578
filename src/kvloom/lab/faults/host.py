"""A unit's place in a run with faults: devices that are watched, and processes that die and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from kvloom.cluster.launcher import Answered, Ended, FoundProcess, News, Snapshot
from kvloom.cluster.reconcile import Timing
from kvloom.cluster.state import Phase, is_gateway
from kvloom.lab.faults.faults import FaultSource
from kvloom.lab.faults.guides import guided_card
from kvloom.lab.faults.invariants import InvariantChecker, LentArena, split_job
from kvloom.lab.faults.journal import Journal
from kvloom.lab.sim.content import Content, JobFailed
from kvloom.lab.sim.cpu import EngineCpu
from kvloom.lab.sim.executor import ModelledExecutor
from kvloom.lab.sim.linear_cost import LinearOperatorCost
from kvloom.lab.sim.processes import (
    GATEWAY_NAME,
    ModelledLauncher,
    ProcessTasks,
    Surroundings,
    UnitHost,
)
from kvloom.lab.sim.unit import SimulatedUnit, modelled_executor
from kvloom.plan.cost.shapes import ModelShape
from kvloom.types.clock import Clock
from kvloom.types.job import Job
from kvloom.types.spec import EngineSpec


class WatchedDevice:
    """Satisfies `Content`: a checker. If the seed has it so, a job fails: at its end, with all written, or,
    if peers wait for its layers, after some of them."""

    def __init__(
        self, host: UnitHost, checker: InvariantChecker, faults: FaultSource, journal: Journal
    ) -> None:
        self._host = host
        self._checker = checker
        self._faults = faults
        self._journal = journal
        self._doomed: set[int] = set()  # by id; while they run

    def begin(self, job: Job) -> None:
        self._tell(job, "begins, share", job.share)
        weights = self._host.process.executor.weights if self._host.process else None
        if weights is not None and job.model not in weights.awake:
            self._checker.wrong.append(f"a job of {job.model}, whose weights are not in memory")
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
        """Gives offloaded rows that do not count any token."""
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
        backend = self._host.process.backend if self._host.process else None
        found = backend.lent_blocks(model) if backend else None
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
        self._journal("job", self._host.name, job.phase.value, job.model, *batch, *how)


LATENCY: Final = 1e-4  # seconds from one unit's memory to another's


@dataclass(slots=True)
class Outage:
    """A node's time without a network, or without power."""

    off: bool
    """Tells whether it has no power."""
    noticed: bool = False
    """Tells whether its connections to the controller are given up. Then what they had to carry is lost."""
    held: list[Callable[[], None]] = field(default_factory=list)
    """The messages that its connections to the controller carry once it is back, unless they are given up
    before."""
    over: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), repr=False
    )
    """The end of the outage. Its result is True once callers' connections work again, and False if they are
    given up with the node."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def end(self, *, healed: bool) -> None:
        for timer in self.timers:
            timer.cancel()
        if not self.over.done():
            self.over.set_result(healed)


class FaultyHost(UnitHost):
    """A unit's place with devices that are watched, and whose jobs fail as the seed has it."""

    def __init__(
        self, unit: SimulatedUnit, around: Surroundings, faults: FaultSource, journal: Journal
    ) -> None:
        super().__init__(unit, around)
        self.checkers: list[InvariantChecker] = []
        """The checkers of all its processes, one after the other."""
        self.outage: Outage | None = None
        """The outage of the node that it is on; None if callers reach it."""
        self._faults = faults
        self._journal = journal

    def start(self) -> None:
        assert self.process is None, f"{self.name} has two processes"
        checker = self._checker()
        self.checkers.append(checker)
        super().start()
        process = self.reached
        process.transport.arena = checker.arena
        self._journal("engine", self.name, "starts,", process.executor.blocks, "blocks")

    def _checker(self) -> InvariantChecker:
        unit, block = self.unit, self.unit.spec.block_bytes
        geometries = {name: shape.geometry(block) for name, shape in unit.shapes.items()}
        vocab = next(iter(unit.shapes.values())).vocab
        others = unit.cost.shapes.values() if isinstance(unit.cost, LinearOperatorCost) else ()
        width = max((shape.geometry(block).tokens_per_block for shape in others), default=0)
        return InvariantChecker(geometries, unit.spec.kv_bytes // block, vocab, width=width)

    def _executor(self, cpu: EngineCpu | None) -> ModelledExecutor:
        executor = modelled_executor(self.unit, self.device(self.checkers[-1]), cpu)
        executor.cards = {name: guided_card(card) for name, card in executor.cards.items()}
        if executor.weights is not None:
            executor.weights.on_loss = self.checkers[-1].forget
        return executor

    def device(self, checker: InvariantChecker) -> Content:
        return WatchedDevice(self, checker, self._faults, self._journal)

    def kill(self) -> None:
        if self.process is not None:
            self._journal("engine", self.name, "dies")
        super().kill()

    async def stop(self) -> None:
        if self.process is not None:
            self._journal("engine", self.name, "stops")
        await super().stop()


AT_ONCE: Final = Timing(first=0.0, most=0.0)
"""The timing of restarts, which wait for nothing, because a fault says itself how long what has died stays
away."""


class FaultyLauncher(ModelledLauncher):
    """Satisfies `Launcher`. A component that was lost gets no process before its time. Gateways are opened by
    somebody else."""

    def __init__(
        self,
        hosts: Mapping[str, UnitHost],
        clock: Clock,
        tasks: ProcessTasks,
        journal: Journal,
        shapes: Mapping[str, ModelShape],
        open_gateway: Callable[[str, Snapshot], Coroutine[Any, Any, None]],
    ) -> None:
        """`shapes` are those of all models that a unit may ever have. `open_gateway` serves the fleet of a
        snapshot as the gateway of this name."""
        super().__init__(hosts, clock, tasks)
        self._journal = journal
        self._shapes = shapes
        self._open_gateway = open_gateway
        self._back: dict[str, float] = {}  # When what was lost may have a process again.
        self._called_off: set[str] = set()  # What was told to end as it started.
        self._ending: set[str] = set()
        self._generations: dict[str, int] = {}  # of the last process of each component
        self._gateway: Literal["opening", "up", ""] = ""

    def lose(self, component: str, down: float) -> None:
        """Tells that the component's process is gone, and gives it none for `down` seconds."""
        self._back[component] = self._clock.now() + down
        if is_gateway(component):
            self._gateway = ""
        self.hear(Ended(component, "was lost"))

    def _call_off(self, component: str) -> None:
        """Lets the start end when its time is over, because what was lost stays away for that long."""
        self._called_off.add(component)

    def begin(self, names: Collection[str]) -> None:
        self._generations.update(dict.fromkeys(names, 1))
        super().begin(names)

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        assert component not in self._starts, f"{component} is started twice"
        self._generations[component] = generation
        super().start(component, generation, engine, node)

    def tell(self, component: str, news: News) -> None:
        if isinstance(news, Snapshot) and not self._gateway:
            self._gateway = "opening"
            self._tasks.spawn(self._serve(component, news))
        else:
            super().tell(component, news)

    def running(self) -> list[FoundProcess]:
        """Returns the units' processes, and the gateway if there is one. At the beginning there is none."""
        phase: Phase = "ready" if self._gateway == "up" else "starting"
        gateway = [FoundProcess(GATEWAY_NAME, 1, phase)] if self._gateway else []
        return [*self._found(self._hosts), *gateway]

    def _found(self, names: Iterable[str]) -> Iterator[FoundProcess]:
        for name in names:
            starting = name in self._starts
            if starting or self._hosts[name].process is not None:
                ends = name in self._ending or name in self._called_off
                phase: Phase = "ending" if ends else "starting" if starting else "ready"
                yield FoundProcess(name, self._generations[name], phase)

    async def _load(self, host: UnitHost, engine: EngineSpec) -> None:
        back = self._back.pop(host.name, None)
        if back is None:
            self._journal.count("units started")
            await super()._load(host, engine)
        else:
            await self._clock.sleep(max(0.0, back - self._clock.now()))
        if host.name in self._called_off:
            self._called_off.discard(host.name)
            raise asyncio.CancelledError
        if engine != host.unit.spec:
            shapes = {model.name: self._shapes[model.name] for model in engine.models}
            host.unit = replace(host.unit, spec=engine, shapes=shapes)

    async def _stop(self, name: str) -> None:
        self._journal.count("units ended")
        self._ending.add(name)
        try:
            await super()._stop(name)
        finally:
            self._ending.discard(name)

    async def _serve(self, gateway: str, snapshot: Snapshot) -> None:
        await self._open_gateway(gateway, snapshot)
        self._gateway = "up"
        self.hear(Answered(gateway))
