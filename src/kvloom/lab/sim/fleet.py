"""A fleet in virtual time: production engines and router over modelled devices, links and wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Final

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Counted, UnitSeen
from kvloom.cluster.mirror import Mirror, Said
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.reconcile import TIMING, Timing
from kvloom.cluster.scheduler import FleetControl, FleetScheduler, Measure
from kvloom.cluster.state import FleetSpec, UnitSpec
from kvloom.cluster.store import SpecStore
from kvloom.config.config import Config
from kvloom.engine.engine import Engine
from kvloom.engine.freeness import Thresholds, freeness
from kvloom.journal.log import Journal
from kvloom.lab.sim.cpu import ServerBehindLoops, SimulatedCpu
from kvloom.lab.sim.links import Link
from kvloom.lab.sim.nodes import NodesLauncher, NodesWire, SimulatedNode, link_between
from kvloom.lab.sim.offload import OffloadingUnits
from kvloom.lab.sim.processes import (
    GATEWAY_NAME,
    ModelledLauncher,
    ModelledWire,
    ProcessTasks,
    Surroundings,
    UnitHost,
)
from kvloom.lab.sim.unit import SimulatedUnit, timed_link
from kvloom.lab.sim.virtual_time import LoopClock
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.types.client import EngineClient, Generator
from kvloom.types.clock import Clock
from kvloom.types.load import UnitLoad
from kvloom.types.service import PATIENCE, GroupSpec
from kvloom.types.spec import SchedulerSpec


@dataclass(frozen=True, slots=True)
class ReschedulingSettings:
    """The settings of a fleet scheduler."""

    period: float = 0.5  # seconds
    thresholds: Thresholds = field(default_factory=Thresholds)
    groups: Mapping[str, GroupSpec] = field(default_factory=dict)
    """The units that come and go, by the name of their group."""
    away: frozenset[str] = frozenset()
    """Those of them that have no process to begin with."""
    usage: Callable[[UnitLoad], float] | None = None
    """The measure that their number follows; None for the scheduler's own."""
    measure: Measure = freeness
    """That of freeness, by which units are paired."""

    @staticmethod
    def of(
        spec: SchedulerSpec,
        groups: Mapping[str, GroupSpec] | None = None,
        away: frozenset[str] = frozenset(),
    ) -> ReschedulingSettings:
        """Returns the settings of a scheduler's specification."""
        thresholds = Thresholds(spec.out, spec.into)
        return ReschedulingSettings(period=spec.period, thresholds=thresholds, groups=groups or {}, away=away)

    @staticmethod
    def of_config(config: Config) -> ReschedulingSettings | None:
        """Returns what the config says of the fleet scheduler; None if it has none."""
        if config.scheduler is None:
            return None
        away = frozenset(spec.unit for spec in config.engines) - frozenset(config.first)
        return ReschedulingSettings.of(config.scheduler, config.groups, away)

    def scheduler(self, fleet: FleetControl, clock: Clock) -> FleetScheduler:
        return FleetScheduler(
            fleet,
            clock,
            period=self.period,
            thresholds=self.thresholds,
            usage=self.usage,
            measure=self.measure,
        )


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """A fleet that serves in virtual time."""

    router: Router
    processes: ModelledLauncher
    server: Generator
    """What clients ask: the router, or the gateway that it works in."""
    controller: Controller
    journal: Journal
    rescheduler: Rescheduler | None = None
    """None if no fleet scheduler runs."""
    nodes: NodesLauncher | None = None
    """The launcher, if the fleet is on several machines."""

    @property
    def engines(self) -> Mapping[str, Engine]:
        """Returns the engines of the units that have a process now, by unit."""
        return self.processes.engines


_NOWHERE: Final[Mapping[str, str]] = MappingProxyType({})


@asynccontextmanager
async def run_fleet(
    units: Sequence[SimulatedUnit],
    program: Program,
    *,
    delay: float = 0.0003,
    link: Callable[[SimulatedUnit], Link] = timed_link,
    cpu: SimulatedCpu | None = None,
    rescheduling: ReschedulingSettings | None = None,
    patience: float = PATIENCE,
    nodes: Sequence[SimulatedNode] = (),
    homes: Mapping[str, str] = _NOWHERE,
    journal: Journal | None = None,
) -> AsyncIterator[SimulatedFleet]:
    """Yields the fleet while it runs, on a virtual loop.

    delay: of the wire, in seconds, one way. link: returns a unit's way out. cpu: the one that all units
    share; None if only jobs take time. rescheduling: of the fleet scheduler; None if there is none. patience:
    the router's. nodes: the machines on which the units are placed as they start; none if all have a process
    from the beginning, each on the machine that `homes` names, or all on one. journal: takes what happens;
    None for one that nobody else has."""
    clock = LoopClock(asyncio.get_running_loop())
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:

        def crashed(error: BaseException) -> None:
            group.create_task(_fail(error))

        offloading = OffloadingUnits(unit.spec for unit in units)
        journal = journal or Journal(clock)
        around = Surroundings(clock, offloading, crashed, delay, link, cpu, journal=journal)
        around.plane.link_between = link_between(homes)
        around.hosts.update((unit.spec.unit, UnitHost(unit, around)) for unit in units)
        machines = NodesLauncher(around.hosts, clock, ProcessTasks(crashed), nodes) if nodes else None
        processes = machines or ModelledLauncher(around.hosts, clock, ProcessTasks(crashed))
        controller = start_controller(
            processes, units, rescheduling, clock, on_nodes=bool(nodes), journal=journal
        )
        if machines is not None:
            around.plane.link_between = machines.link
            machines.join()
        stack.push_async_callback(processes.end)
        mirror = Mirror(
            controller.snapshot, lambda said: forward_to_controller(controller, GATEWAY_NAME, said)
        )
        processes.told = mirror.heed
        running = asyncio.get_running_loop().create_task(controller.run())
        stack.callback(running.cancel)

        def client(unit: str) -> EngineClient:
            if nodes:
                return NodesWire(around.hosts[unit], clock, delay)
            return ModelledWire(around.hosts[unit], clock, delay, through_loop=cpu is not None)

        record = partial(journal.add, GATEWAY_NAME)
        router = Router(FleetLink(mirror, client), program, clock, patience=patience, record=record)
        await stack.enter_async_context(router)
        rescheduler = None
        if rescheduling:
            orders = FleetOrders(mirror, router.units, seconds=inf)
            rescheduler = await stack.enter_async_context(Rescheduler(router, clock, orders, record))
            scheduling = group.create_task(rescheduling.scheduler(rescheduler, clock).run())
            stack.callback(scheduling.cancel)
        server = ServerBehindLoops(router, cpu) if cpu else router
        yield SimulatedFleet(router, processes, server, controller, journal, rescheduler, machines)


async def _fail(error: BaseException) -> None:
    raise error


def start_controller(
    launcher: ModelledLauncher,
    units: Sequence[SimulatedUnit],
    rescheduling: ReschedulingSettings | None,
    clock: Clock,
    timing: Timing = TIMING,
    *,
    on_nodes: bool = False,
    store: SpecStore | None = None,
    journal: Journal | None = None,
) -> Controller:
    """Gives the units their processes, and returns the controller of the fleet, which has yet to run.
    on_nodes: whether they get them later, on nodes. store: keeps the specification for another controller."""
    given = rescheduling or ReschedulingSettings()
    wanted = {
        unit.spec.unit: UnitSpec(engine=unit.spec, wanted=unit.spec.unit not in given.away) for unit in units
    }
    if not on_nodes:
        launcher.begin([name for name, unit in wanted.items() if unit.wanted])
    spec = FleetSpec(units=wanted, groups=dict(given.groups), on_nodes=on_nodes)
    controller = Controller(spec, launcher, clock, store=store, timing=timing, journal=journal)
    launcher.hear = controller.hear
    return controller


def forward_to_controller(controller: Controller, gateway: str, said: Said) -> None:
    """Takes to the controller what a gateway says."""
    match said:
        case Edit():
            controller.answer(gateway, said)
        case Counted():
            controller.count(gateway, said)
        case UnitSeen():
            controller.hear(said)
