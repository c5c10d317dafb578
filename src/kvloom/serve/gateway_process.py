"""The process of one gateway: `python -m kvloom.serve.gateway_process FD`. Never imports torch."""

from __future__ import annotations

import asyncio
import signal
import socket

import uvloop

from kvloom.api.app import create_app
from kvloom.router.client import HttpEngineClient
from kvloom.serve.connection import ClientConnection
from kvloom.serve.orders import GatewayOrder, Ready
from kvloom.serve.parent import Parent, run_child
from kvloom.serve.server import Server

GRACE_SECONDS = 2  # for running streams, once told to end


def main(parent: Parent) -> None:
    order = parent.order(GatewayOrder)  # comes when the engine answers; the imports are done by then
    parent.watch()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parent, order))


async def serve(parent: Parent, order: GatewayOrder) -> None:
    """Answer the OpenAI API until SIGTERM, which the parent's end is too."""
    async with HttpEngineClient(order.engine, secret=order.secret) as client:
        app = create_app(client, api_keys=order.api_keys, max_body=order.max_body)
        server = Server(
            app,
            connection=ClientConnection,
            grace=GRACE_SECONDS,
            ready=lambda: parent.report(Ready()),
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.end)
        await server.serve(sockets=[socket.socket(fileno=order.listener)])


if __name__ == "__main__":
    run_child(main)
