"""A fleet of ledgers under a controller, for tests that are its processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Answered, Counted, Ended, FoundProcess, News, Snapshot, UnitSeen
from kvloom.cluster.mirror import Mirror, Said
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.reconcile import Timing
from kvloom.cluster.state import FleetSpec, UnitSpec, is_gateway
from kvloom.router.program import load_program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.types.service import GroupSpec, RestartStep, Scale, UnitState
from kvloom.types.spec import EngineSpec, ModelSpec
from tests.router.fleets import Fleets, ManualClock, turns
from tests.router.ledger import LedgerEngine, World, card

SHORT, LONG = 0.01, 60.0
GATEWAY = "gateway/1"


def spec(name: str) -> EngineSpec:
    return EngineSpec(
        unit=name,
        models=(ModelSpec(name="m", path="/m"),),
        kv_bytes=1 << 20,
        block_bytes=256,
        policy="fcfs",
        max_running=1,
        max_waiting=1,
        chunk_tokens=1,
        threads=1,
    )


class Processes:
    """Satisfies `Launcher`: the engines of a world, and one gateway that serves already."""

    def __init__(self, world: World) -> None:
        self.done: list[str] = []
        """What was asked, in order."""
        self.starts = asyncio.Event()
        """Until then nothing that was asked to start answers."""
        self.ends = asyncio.Event()
        self.ends.set()
        """Until then nothing that was asked to end does."""
        self.problem = ""
        """What new processes die of."""
        self.problems: dict[str, str] = {}
        """What those of one component die of."""
        self.beside = [GATEWAY]
        """What has a process beside the units."""
        self.controller: Controller
        self.mirrors: dict[str, Mirror] = {}
        self.news: list[tuple[str, News]] = []
        """Which gateway was told what, in order."""
        self._world = world
        self._tasks = set[asyncio.Task[None]]()
        self.generations: dict[str, int] = {}
        self.gone: set[str] = set()
        self.deaf: set[str] = set()
        """Units whose next processes cannot be reached yet."""
        self.ended = asyncio.Event()
        """Whether anything was asked to end."""

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        self.done.append(f"start {component}")
        self.generations[component] = generation
        ledger = self._world.engines.get(component)
        if ledger is not None and engine is not None:
            names = [name for model in engine.models for name in model.names]
            if names != [one.name for one in ledger.cards]:
                ledger.cards = tuple(
                    one
                    for model in engine.models
                    for one in (
                        card(model.name),
                        *(card(own.name, path=own.path, parent=model.name) for own in model.adapters),
                    )
                )
        self._spawn(self._start(component))

    def stop(self, component: str) -> None:
        self.done.append(f"stop {component}")
        if (engine := self._world.engines.get(component)) is not None:
            engine.restart()
            engine.down = True
        self.ended.set()
        self._spawn(self._stop(component))

    def kill(self, component: str) -> None:
        self.done.append(f"kill {component}")
        self.stop(component)

    def discard(self, node: str, component: str) -> None:
        """Does nothing: there are no other nodes."""

    def retire(self, component: str) -> None:
        self.done.append(f"retire {component}")

    def forget(self, component: str) -> None:
        self.done.append(f"forget {component}")

    def tell(self, component: str, news: News) -> None:
        self.news.append((component, news))
        if component in self.mirrors:
            self.mirrors[component].heed(news)

    def running(self) -> Sequence[FoundProcess]:
        units = (name for name, engine in self._world.engines.items() if not engine.down)
        found = [FoundProcess(name, self._generation(name), "ready") for name in (*units, *self.beside)]
        return [one for one in found if one.component not in self.gone]

    def _generation(self, name: str) -> int:
        if is_gateway(name):
            return int(name.partition("/")[2])
        return self.generations.get(name, 1)

    def die(self, component: str, how: str = "was killed by SIGKILL") -> None:
        """Its process ends by itself."""
        self._world.engines[component].restart()
        self._world.engines[component].down = True
        self.controller.hear(Ended(component, how))

    def send_from(self, gateway: str) -> Callable[[Said], None]:
        """What a gateway says, to the controller."""

        def send(said: Said) -> None:
            match said:
                case Edit():
                    self.mirrors[gateway].heed(self.controller.edit(said))
                case Counted():
                    self.controller.count(gateway, said)
                case UnitSeen():
                    self.controller.hear(said)

        return send

    async def _start(self, component: str) -> None:
        await self.starts.wait()
        if problem := self.problems.get(component, self.problem):
            self.controller.hear(Ended(component, problem))
            return
        if (engine := self._world.engines.get(component)) is not None:
            engine.down = component in self.deaf
        self.gone.discard(component)
        self.controller.hear(Answered(component))

    async def _stop(self, component: str) -> None:
        await self.ends.wait()
        self.gone.add(component)
        self.controller.hear(Ended(component, "ended with exit code 0"))

    def _spawn(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type,var-annotated]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()


@dataclass
class Managed:
    """A fleet whose processes the test starts and ends."""

    fleets: Fleets
    controller: Controller
    processes: Processes
    orders: FleetOrders
    rescheduler: Rescheduler
    seen: list[dict[str, str]] = field(default_factory=list)

    @property
    def router(self) -> Router:
        return self.fleets.router

    def states(self) -> dict[str, str]:
        return dict(self.fleets.router.services)

    def state(self, name: str) -> UnitState:
        return self.orders.state(name)

    @asynccontextmanager
    async def another_gateway(
        self, snapshot: Snapshot | None = None
    ) -> AsyncIterator[tuple[Router, FleetOrders]]:
        """One beside the first, which has not read yet what was told since the snapshot."""
        mirror = Mirror(snapshot or self.controller.snapshot, self.processes.send_from("gateway/2"))
        self.processes.mirrors["gateway/2"] = mirror
        self.controller.adopt(FoundProcess("gateway/2", 2, "retiring"))
        router = Router(
            FleetLink(mirror, lambda name: self.fleets.world.engines[name]),
            load_program("data_parallel"),
            self.fleets.clock,
        )
        if snapshot is not None:
            mirror.heed(self.controller.snapshot)
        async with router:
            yield router, FleetOrders(mirror, router.units, seconds=LONG)
        self.controller.hear(Ended("gateway/2", "ended with exit code 0"))

    @property
    def done(self) -> list[str]:
        return self.processes.done

    @property
    def steps(self) -> list[RestartStep]:
        return [*self.controller.status.steps]


@asynccontextmanager
async def managed(
    units: int,
    program: str = "data_parallel",
    *,
    seconds: float = LONG,
    patience: float = LONG,
    scale: Scale | None = None,
    scheduler: bool = False,
) -> AsyncIterator[Managed]:
    """Units a, b, c …, each with the model m, that serve at first, in one group if there is a scale."""
    world, clock = World(), ManualClock()
    names = tuple("abcdefgh"[:units])
    for name in names:
        world.engine(name)
    processes = Processes(world)
    if scheduler:
        processes.beside.append("scheduler")
    fleet = FleetSpec(
        units={name: UnitSpec(engine=spec(name)) for name in names},
        groups={"g": GroupSpec(names, scale)} if scale else {},
        scheduler=int(scheduler),
        drain=seconds,
    )
    controller = processes.controller = Controller(fleet, processes, clock, timing=Timing(first=0.5))
    mirror = Mirror(controller.snapshot, processes.send_from(GATEWAY))
    processes.mirrors[GATEWAY] = mirror

    def connect(name: str) -> LedgerEngine:
        return world.engines.get(name) or world.engine(name)

    link = FleetLink(mirror, connect)
    running = asyncio.get_running_loop().create_task(controller.run())
    async with Router(link, load_program(program), clock, patience=patience) as router:
        orders = FleetOrders(mirror, router.units, seconds=seconds, memory=1 << 30, cores=4)
        made = Managed(
            Fleets(router, world, clock), controller, processes, orders, Rescheduler(router, clock, orders)
        )
        await turns()
        yield made
        await turns()
        assert made.fleets.holds_nothing, world.held
        mirror.give_up()
    running.cancel()
    await asyncio.wait([running])
    await processes.close()
    assert running.cancelled(), running.exception()


__all__ = ["LONG", "SHORT", "Managed", "Snapshot", "managed", "spec"]
