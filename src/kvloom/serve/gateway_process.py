"""The process of one gateway: `python -m kvloom.serve.gateway_process FD NAME`. Never imports torch."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import uvloop
from msgspec.structs import replace

from kvloom.api.admin import Admin
from kvloom.api.admin_units import UnitOrders
from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.core.clock import WallClock
from kvloom.core.errors import ConfigError
from kvloom.core.replicas import Steps
from kvloom.router.drains import Drains
from kvloom.router.program import Program, load_program
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
    Begin,
    GatewayOrder,
    News,
    Ready,
    Restarted,
    Retire,
    Standing,
    Stopped,
)
from kvloom.serve.parent import Parent, run_child
from kvloom.serve.restarts import Restarts
from kvloom.serve.server import Server
from kvloom.serve.shelf import Shelf

_log = logging.getLogger(__name__)
GRACE_SECONDS = 2  # for running streams, once told to end


def main(parent: Parent) -> None:
    order = parent.order(GatewayOrder)
    sys.path.append(order.folder)  # after all else, so that nothing there stands for another module
    program, standing = load_standing(order)
    parent.order(Begin)  # comes when the engines answer; the imports are done by then
    parent.report(standing)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parent, order, program, standing))


def load_standing(order: GatewayOrder) -> tuple[Program, Standing]:
    """The program that was set while another gateway served, else the config's; and what stands from now on.
    Raises ConfigError where the config's cannot be loaded."""
    standing, configured = order.standing, order.program
    if standing.program is not None:
        try:
            return load_program(standing.program.name, standing.program.options), standing
        except ConfigError as error:
            _log.warning(
                "%s; it was set while serving, and is forgotten: %s runs again, as configured",
                error.message,
                configured.name,
            )
    return load_program(configured.name, configured.options), replace(standing, program=None)


async def serve(parent: Parent, order: GatewayOrder, program: Program, standing: Standing) -> None:
    """Answer the OpenAI API until SIGTERM, which the parent's end is too."""
    kept, shelf = Kept(standing, parent.report), Shelf(Path(order.sockets))
    restarts = Restarts(parent.report, shelf)

    def heed(news: News) -> None:
        match news:
            case Restarted() | Stopped():
                restarts.heed(news)
            case Away(units):
                roster.heed(units)
            case Back(unit):
                restarts.heed(news)
                if unit in router.units:
                    tasks.create_task(router.units[unit].ask())
            case Retire():
                server.retire(order.drain)

    loop = asyncio.get_running_loop()
    parent.watch(Path(order.sockets), lambda news: soon(loop, heed, news))
    async with AsyncExitStack() as stack:
        clock = WallClock()
        clients = Clients(order.engines, order.sockets, order.secret)
        await stack.enter_async_context(clients)  # closed last: those below call engines to their end
        router = Router(
            {unit: await clients.of(unit) for unit in order.engines},
            program,
            clock,
            withdrawn=standing.drained,
            away={unit: shelf.cards(unit) for unit in order.away},
            patience=order.patience,
        )
        await stack.enter_async_context(router)
        roster = Roster(
            router,
            specs=order.specs,
            groups=order.groups,
            processes=restarts,
            connect=clients.of,
            changed=kept.leaving,
            memory=order.memory,
            cores=order.cores,
        )
        await stack.enter_async_context(roster)
        roster.begin(Steps(stop=tuple(standing.leaving)))
        rescheduler = await stack.enter_async_context(Rescheduler(router, clock, roster))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        drains = Drains(router, seconds=order.drain, restart=restarts, changed=kept.drained)
        await stack.enter_async_context(drains)
        rolling = Rolling(drains, clock, restart=restarts, beside=order.beside)
        await stack.enter_async_context(rolling)
        orders = UnitOrders(router.units, drains, rolling, roster, order.drain)
        server = Server(
            create_app(
                router,
                keys=Keys(order.api_keys, order.admin_keys, order.secret),
                max_body=order.max_body,
                admin=Admin(router, orders, rolling, rescheduler, kept.program),
                moves=lambda: rescheduler.moves,
            ),
            connection=ClientConnection,
            grace=GRACE_SECONDS,
            ready=lambda: parent.report(Ready()),
        )

        def end() -> None:
            drains.give_up()
            server.end()

        loop.add_signal_handler(signal.SIGTERM, end)
        await server.serve(sockets=[socket.socket(fileno=order.listener)])


def soon(loop: asyncio.AbstractEventLoop, heed: Callable[[News], None], news: News) -> None:
    """On the event loop, from any thread."""
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(heed, news)


if __name__ == "__main__":
    run_child(main)
