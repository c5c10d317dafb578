"""The process of one gateway: `python -m kvloom.serve.gateway_process FD NAME`. Never imports torch."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from kvloom.api.app import create_app
from kvloom.core.client import EngineClient
from kvloom.core.errors import ConfigError
from kvloom.core.spec import ProgramSpec
from kvloom.router.client import HttpEngineClient
from kvloom.serve.connection import ClientConnection
from kvloom.serve.orders import Begin, GatewayOrder, Ready
from kvloom.serve.parent import Parent, run_child
from kvloom.serve.server import Server

GRACE_SECONDS = 2  # for running streams, once told to end


def main(parent: Parent) -> None:
    order = parent.order(GatewayOrder)
    sys.path.append(order.folder)  # after all else, so that nothing there stands for another module
    check_program(order.program)
    parent.order(Begin)  # comes when the engines answer; the imports are done by then
    parent.watch(Path(order.sockets))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parent, order))


async def serve(parent: Parent, order: GatewayOrder) -> None:
    """Answer the OpenAI API until SIGTERM, which the parent's end is too."""
    async with AsyncExitStack() as stack:
        engines = {
            unit: await stack.enter_async_context(HttpEngineClient(url, secret=order.secret))
            for unit, url in order.engines.items()
        }
        app = create_app(route(engines, order.program), api_keys=order.api_keys, max_body=order.max_body)
        server = Server(
            app,
            connection=ClientConnection,
            grace=GRACE_SECONDS,
            ready=lambda: parent.report(Ready()),
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.end)
        await server.serve(sockets=[socket.socket(fileno=order.listener)])


def check_program(program: ProgramSpec) -> None:
    """Whether there is such a program, before models are loaded in vain. Raises ConfigError."""


def route(engines: Mapping[str, EngineClient], program: ProgramSpec) -> EngineClient:
    """Whoever answers for all engines: the router goes here."""
    if len(engines) > 1:
        raise ConfigError(f"units: {len(engines)} engines, and there is no router yet")
    return next(iter(engines.values()))


if __name__ == "__main__":
    run_child(main)
