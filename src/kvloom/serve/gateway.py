"""A gateway, put together: the router and its units, what is asked of them, and the server before it all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvloom.api.admin import Admin
from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.cluster.launcher import Snapshot
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.orders import FleetOrders
from kvloom.router.client import UNIX, HttpEngineClient
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.serve.connection import ClientConnection
from kvloom.serve.orders import GatewayOrder, News, Ready, Report, RetireOrder, kept_cards
from kvloom.serve.server import HttpServer
from kvloom.types.clock import Clock, WallClock


class Clients:
    """An async context manager, which closes all. A unit that went and comes again has the client that it
    had."""

    def __init__(self, sockets: str, secret: str) -> None:
        """`sockets` is the folder in which each unit serves at a path of its own."""
        self._sockets = sockets
        self._secret = secret
        self._stack = AsyncExitStack()
        self._clients: dict[str, HttpEngineClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def of(self, unit: str) -> HttpEngineClient:
        """Returns the unit's client, whether it has a process or not."""
        if unit not in self._clients:
            client = HttpEngineClient(f"{UNIX}{self._sockets}/{unit}.sock", secret=self._secret)
            self._clients[unit] = client.open()
            self._stack.push_async_exit(client)
        return self._clients[unit]


GRACE_SECONDS: Final = 2  # for running streams, once told to end; half of it by themselves


@dataclass(frozen=True, slots=True)
class GatewayServer:
    """Heeds its supervisor while it serves."""

    mirror: Mirror
    server: HttpServer
    drain: float
    """Seconds for streams when another gateway takes its place."""
    ending: asyncio.Event
    """Set once it is told to end."""

    def heed(self, news: News) -> None:
        if isinstance(news, RetireOrder):
            self.server.retire(self.drain)
        else:
            self.mirror.heed(news)

    def end(self) -> None:
        self.mirror.give_up()
        self.server.end()
        self.ending.set()


@asynccontextmanager
async def gateway(
    order: GatewayOrder, program: Program, snapshot: Snapshot, report: Callable[[Report], None]
) -> AsyncIterator[GatewayServer]:
    """Puts a gateway together. snapshot: the fleet that it is to serve; report: takes reports to the
    supervisor."""
    mirror, clock = Mirror(snapshot, report), WallClock()
    async with AsyncExitStack() as stack:
        clients = Clients(order.sockets, order.secret)
        await stack.enter_async_context(clients)  # closed last: those below call engines to their end
        link = FleetLink(mirror, clients.of, lambda unit: kept_cards(Path(order.sockets), unit))
        router = await stack.enter_async_context(Router(link, program, clock, patience=order.patience))
        orders = FleetOrders(
            mirror, router.units, seconds=order.drain, memory=order.memory, cores=order.cores
        )
        rescheduler = await stack.enter_async_context(Rescheduler(router, clock, orders))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        app = create_app(
            router,
            keys=Keys(order.api_keys, order.admin_keys, order.secret),
            max_body=order.max_body,
            admin=Admin(router, orders, rescheduler),
            moves=lambda: rescheduler.moves,
        )
        server = HttpServer(
            app, connection=ClientConnection, grace=GRACE_SECONDS, ready=lambda: report(Ready())
        )
        ending = asyncio.Event()
        last = tasks.create_task(_end_streams(router, ending, clock))
        yield GatewayServer(mirror, server, order.drain, ending)
        last.cancel()


async def _end_streams(router: Router, ending: asyncio.Event, clock: Clock) -> None:
    """Ends the streams of callers who still wait when half of the grace is over, so that they read why."""
    await ending.wait()
    await clock.sleep(GRACE_SECONDS / 2)
    await router.abort_all()
