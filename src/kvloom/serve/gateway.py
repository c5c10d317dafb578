"""A gateway, put together: the router and its units, what is asked of them, and the server before it all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvloom.api.admin import Admin
from kvloom.api.admin_units import UnitOrders
from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.router.drains import Drains
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.rolling import Rolling
from kvloom.router.roster import Roster
from kvloom.router.router import Router
from kvloom.serve.clients import Clients
from kvloom.serve.connection import ClientConnection
from kvloom.serve.kept import Kept
from kvloom.serve.orders import (
    Away,
    Back,
    GatewayOrder,
    News,
    Ready,
    Report,
    Restarted,
    Retire,
    Standing,
    Stopped,
)
from kvloom.serve.restarts import Restarts
from kvloom.serve.server import Server
from kvloom.serve.shelf import Shelf
from kvloom.types.clock import Clock, WallClock

GRACE_SECONDS: Final = 2  # for running streams, once told to end; half of it by themselves


@dataclass(frozen=True, slots=True)
class Gateway:
    """Heeds its supervisor while it serves. drain: seconds for streams when another takes its place. ending:
    it is told to end."""

    router: Router
    roster: Roster
    restarts: Restarts
    drains: Drains
    server: Server
    tasks: asyncio.TaskGroup
    drain: float
    ending: asyncio.Event

    def heed(self, news: News) -> None:
        match news:
            case Restarted() | Stopped():
                self.restarts.heed(news)
            case Away(units):
                self.roster.heed(units)
            case Back(name):
                self.restarts.heed(news)
                if unit := self.router.units.get(name):
                    self.tasks.create_task(unit.ask())
            case Retire():
                self.server.retire(self.drain)

    def end(self) -> None:
        self.drains.give_up()
        self.server.end()
        self.ending.set()


@asynccontextmanager
async def gateway(
    order: GatewayOrder, program: Program, standing: Standing, report: Callable[[Report], None]
) -> AsyncIterator[Gateway]:
    """standing: what was set while another gateway served. report: to the supervisor."""
    kept, shelf, clock = Kept(standing, report), Shelf(Path(order.sockets)), WallClock()
    restarts = Restarts(report, shelf)
    async with AsyncExitStack() as stack:
        clients = Clients(order.engines, order.sockets, order.secret)
        await stack.enter_async_context(clients)  # closed last: those below call engines to their end
        router = await _router(order, program, standing, clients, shelf, clock)
        await stack.enter_async_context(router)
        roster = await stack.enter_async_context(_roster(order, router, restarts, clients, kept))
        roster.leave(standing.leaving)
        rescheduler = await stack.enter_async_context(Rescheduler(router, clock, roster))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        drains = Drains(router, seconds=order.drain, restart=restarts, changed=kept.drained)
        await stack.enter_async_context(drains)
        rolling = Rolling(drains, clock, restart=restarts, beside=order.beside)
        await stack.enter_async_context(rolling)
        orders = UnitOrders(drains, rolling, roster, order.drain)
        app = create_app(
            router,
            keys=Keys(order.api_keys, order.admin_keys, order.secret),
            max_body=order.max_body,
            admin=Admin(router, orders, rolling, rescheduler, kept.program),
            moves=lambda: rescheduler.moves,
        )
        server = Server(app, connection=ClientConnection, grace=GRACE_SECONDS, ready=lambda: report(Ready()))
        ending = asyncio.Event()
        last = tasks.create_task(_end_streams(router, ending, clock))
        yield Gateway(router, roster, restarts, drains, server, tasks, order.drain, ending)
        last.cancel()


async def _end_streams(router: Router, ending: asyncio.Event, clock: Clock) -> None:
    """Of callers who wait still when the grace is half over: they are to read why."""
    await ending.wait()
    await clock.sleep(GRACE_SECONDS / 2)
    await router.abort_all()


async def _router(
    order: GatewayOrder, program: Program, standing: Standing, clients: Clients, shelf: Shelf, clock: Clock
) -> Router:
    return Router(
        {unit: await clients.of(unit) for unit in order.engines},
        program,
        clock,
        withdrawn=standing.drained,
        away={unit: shelf.cards(unit) for unit in order.away},
        patience=order.patience,
    )


def _roster(order: GatewayOrder, router: Router, processes: Restarts, clients: Clients, kept: Kept) -> Roster:
    return Roster(
        router,
        specs=order.specs,
        groups=order.groups,
        processes=processes,
        connect=clients.of,
        changed=kept.leaving,
        memory=order.memory,
        cores=order.cores,
    )
