"""A fleet in virtual time: production engines and router over modelled devices, links and wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from math import inf

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Counted, UnitSeen
from kvloom.cluster.mirror import Mirror, Said
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.scheduler import FleetScheduler
from kvloom.cluster.state import FleetSpec, UnitSpec
from kvloom.engine.engine import Engine
from kvloom.engine.freeness import Thresholds
from kvloom.lab.sim.hosting import HostedMachine
from kvloom.lab.sim.links import Link
from kvloom.lab.sim.processes import GATEWAY_NAME, ModelledLauncher
from kvloom.lab.sim.unit import SimulatedUnit, timed_link
from kvloom.lab.sim.virtual_time import LoopClock
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.types.client import Generator
from kvloom.types.clock import Clock
from kvloom.types.load import UnitLoad
from kvloom.types.service import PATIENCE, GroupSpec
from kvloom.types.spec import SchedulerSpec


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """The settings of a fleet scheduler."""

    period: float = 0.5  # seconds
    thresholds: Thresholds = field(default_factory=Thresholds)
    groups: Mapping[str, GroupSpec] = field(default_factory=dict)
    """The units that come and go, by the name of their group."""
    away: frozenset[str] = frozenset()
    """Those of them that have no process to begin with."""
    usage: Callable[[UnitLoad], float] | None = None
    """The measure that their number follows; None for the scheduler's own."""


def rescheduling(
    spec: SchedulerSpec, groups: Mapping[str, GroupSpec] | None = None, away: frozenset[str] = frozenset()
) -> Rescheduling:
    """Returns what a config says of the fleet scheduler."""
    return Rescheduling(spec.period, Thresholds(spec.out, spec.into), groups or {}, away)


@asynccontextmanager
async def rescheduled(
    router: Router, clock: Clock, given: Rescheduling, orders: FleetOrders | None = None
) -> AsyncIterator[Rescheduler]:
    """Requests of `router` move while it is open, and units come and go if there are orders to give."""
    async with Rescheduler(router, clock, orders) as rescheduler, asyncio.TaskGroup() as group:
        scheduler = FleetScheduler(
            rescheduler, clock, period=given.period, thresholds=given.thresholds, usage=given.usage
        )
        running = group.create_task(scheduler.run())
        try:
            yield rescheduler
        finally:
            running.cancel()


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """server: what clients ask; the router, or the gateway that it works in. rescheduler: None where no
    fleet scheduler runs."""

    router: Router
    processes: ModelledLauncher
    server: Generator
    rescheduler: Rescheduler | None = None

    @property
    def engines(self) -> Mapping[str, Engine]:
        """Returns the engines of the units that have a process now, by unit."""
        return self.processes.engines


@asynccontextmanager
async def simulated(
    units: Sequence[SimulatedUnit],
    program: Program,
    *,
    delay: float = 0.0003,
    link: Callable[[SimulatedUnit], Link] = timed_link,
    machine: HostedMachine | None = None,
    rescheduling: Rescheduling | None = None,
    patience: float = PATIENCE,
) -> AsyncIterator[SimulatedFleet]:
    """The fleet while it runs, on a virtual loop. delay: of the wire, in seconds, one way. link: a unit's
    way out. machine: what all units run on, where its own work counts. rescheduling: of the fleet scheduler;
    None where there is none. patience: the router's."""
    clock, by_name = LoopClock(asyncio.get_running_loop()), {unit.spec.unit: unit for unit in units}
    away = rescheduling.away if rescheduling else frozenset()
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        processes = ModelledLauncher(by_name, clock, group, delay=delay, link=link, machine=machine)
        processes.begin([name for name in by_name if name not in away])
        stack.push_async_callback(processes.end)
        mirror = _controlled(processes, by_name, rescheduling, clock, stack)
        router = Router(FleetLink(mirror, processes.client), program, clock, patience=patience)
        await stack.enter_async_context(router)
        rescheduler = None
        if rescheduling:
            orders = FleetOrders(mirror, router.units, seconds=inf)
            moving = rescheduled(router, clock, rescheduling, orders)
            rescheduler = await stack.enter_async_context(moving)
        server = machine.server(router) if machine else router
        yield SimulatedFleet(router, processes, server, rescheduler)


def _controlled(
    processes: ModelledLauncher,
    units: Mapping[str, SimulatedUnit],
    rescheduling: Rescheduling | None,
    clock: Clock,
    stack: AsyncExitStack,
) -> Mirror:
    """Returns what a gateway knows of these units. Their controller works until the stack is closed."""
    given = rescheduling or Rescheduling()
    spec = FleetSpec(
        units={
            name: UnitSpec(engine=unit.spec, wanted=name not in given.away) for name, unit in units.items()
        },
        groups=dict(given.groups),
    )
    controller = Controller(spec, processes, clock)
    processes.hear = controller.hear

    def send(said: Said) -> None:
        match said:
            case Edit():
                controller.answer(GATEWAY_NAME, said)
            case Counted():
                controller.count(GATEWAY_NAME, said)
            case UnitSeen():
                controller.hear(said)

    mirror = Mirror(controller.snapshot, send)
    processes.told = mirror.heed
    running = asyncio.get_running_loop().create_task(controller.run())
    stack.callback(running.cancel)
    return mirror
