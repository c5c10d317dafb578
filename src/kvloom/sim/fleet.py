"""A fleet in virtual time: production engines and router over modelled devices, links and wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvloom.core.client import Generator
from kvloom.core.service import PATIENCE
from kvloom.engine.engine import Engine
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.roster import Roster
from kvloom.router.router import Router
from kvloom.sim.clock import LoopClock
from kvloom.sim.hosting import HostedMachine
from kvloom.sim.links import Link
from kvloom.sim.processes import ModelledProcesses
from kvloom.sim.rescheduling import Rescheduling, rescheduled
from kvloom.sim.unit import SimulatedUnit, timed_link


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """server: what clients ask; the router, or the gateway that it works in. rescheduler: None where no
    fleet scheduler runs."""

    router: Router
    processes: ModelledProcesses
    server: Generator
    rescheduler: Rescheduler | None = None

    @property
    def engines(self) -> Mapping[str, Engine]:
        """By unit, of those that have a process now."""
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
        processes = ModelledProcesses(by_name, clock, group, delay=delay, link=link, machine=machine)
        processes.begin([name for name in by_name if name not in away])
        stack.push_async_callback(processes.end)
        wires = {name: await processes.client(name) for name in by_name}
        router = Router(
            wires, program, clock, away={name: () for name in by_name if name in away}, patience=patience
        )
        await stack.enter_async_context(router)
        rescheduler = None
        if rescheduling:
            roster = await stack.enter_async_context(_roster(router, by_name, rescheduling, processes))
            moving = rescheduled(router, clock, rescheduling, roster)
            rescheduler = await stack.enter_async_context(moving)
        server = machine.server(router) if machine else router
        yield SimulatedFleet(router, processes, server, rescheduler)


def _roster(
    router: Router,
    units: Mapping[str, SimulatedUnit],
    rescheduling: Rescheduling,
    processes: ModelledProcesses,
) -> Roster:
    return Roster(
        router,
        specs=[unit.spec for unit in units.values()],
        groups=rescheduling.groups,
        processes=processes,
        connect=processes.client,
        changed=lambda going: None,
        memory=0,  # nobody plans anew
        cores=0,
    )
