"""The process of one gateway: `python -m kvloom.serve.gateway_process FD NAME`. Never imports torch."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from kvloom.api.admin import admin_routes
from kvloom.api.app import create_app
from kvloom.core.clock import WallClock
from kvloom.router.client import HttpEngineClient
from kvloom.router.program import Program, load_program
from kvloom.router.router import Router
from kvloom.serve.connection import ClientConnection
from kvloom.serve.orders import Begin, GatewayOrder, Ready
from kvloom.serve.parent import Parent, run_child
from kvloom.serve.server import Server

GRACE_SECONDS = 2  # for running streams, once told to end


def main(parent: Parent) -> None:
    order = parent.order(GatewayOrder)
    sys.path.append(order.folder)  # after all else, so that nothing there stands for another module
    program = load_program(order.program.name, order.program.options)
    parent.order(Begin)  # comes when the engines answer; the imports are done by then
    parent.watch(Path(order.sockets))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parent, order, program))


async def serve(parent: Parent, order: GatewayOrder, program: Program) -> None:
    """Answer the OpenAI API until SIGTERM, which the parent's end is too."""
    async with AsyncExitStack() as stack:
        engines = {
            unit: await stack.enter_async_context(HttpEngineClient(url, secret=order.secret))
            for unit, url in order.engines.items()
        }
        router = await stack.enter_async_context(Router(engines, program, WallClock()))
        server = Server(
            create_app(
                router,
                api_keys=order.api_keys,
                max_body=order.max_body,
                admin=admin_routes(router, engines),
            ),
            connection=ClientConnection,
            grace=GRACE_SECONDS,
            ready=lambda: parent.report(Ready()),
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.end)
        await server.serve(sockets=[socket.socket(fileno=order.listener)])


if __name__ == "__main__":
    run_child(main)
