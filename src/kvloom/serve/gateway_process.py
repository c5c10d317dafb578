"""The process of one gateway: `python -m kvloom.serve.gateway_process FD NAME`. Never imports torch."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvloop

from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Snapshot
from kvloom.router.program import Program, load_program
from kvloom.serve.gateway import GatewayServer, gateway
from kvloom.serve.messages import GatewayOrder, News, Report
from kvloom.serve.parent import Parent, run_child
from kvloom.types.errors import ConfigError

_log = logging.getLogger(__name__)


def main(parent: Parent) -> None:
    order = parent.order(GatewayOrder)
    sys.path.append(order.folder)  # after all else, so that nothing there stands for another module
    configured = load_program(order.program.name, order.program.options)
    snapshot = parent.order(Snapshot)  # comes when the engines answer; the imports are done by then
    program = set_program(order, snapshot, configured, parent.report)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parent, order, program, snapshot))


def set_program(
    order: GatewayOrder, snapshot: Snapshot, configured: Program, report: Callable[[Report], None]
) -> Program:
    """Returns the program that was set while another gateway served, else the config's. One that cannot be
    loaded any more is forgotten."""
    given = snapshot.spec.program
    if given is None or given == order.program:
        return configured
    try:
        return load_program(given.name, given.options)
    except ConfigError as error:
        _log.warning(
            "%s; it was set while serving, and is forgotten: %s runs again, as configured",
            error.message,
            order.program.name,
        )
        report(Edit(program=order.program))
        return configured


async def serve(parent: Parent, order: GatewayOrder, program: Program, snapshot: Snapshot) -> None:
    """Answers the OpenAI API until SIGTERM, which the parent's end is too."""
    loop = asyncio.get_running_loop()
    early: list[News] = []
    serving: GatewayServer | None = None

    def heed(news: News) -> None:
        if serving is None:
            early.append(news)
        else:
            serving.heed(news)

    parent.watch(Path(order.sockets), lambda news: soon(loop, heed, news))
    async with gateway(order, program, snapshot, parent.report) as made:
        serving = made
        for news in early:
            heed(news)
        loop.add_signal_handler(signal.SIGTERM, made.end)
        await made.server.serve(sockets=[socket.socket(fileno=order.listener)])


def soon(loop: asyncio.AbstractEventLoop, heed: Callable[[News], None], news: News) -> None:
    """Calls a function on the event loop, from any thread."""
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(heed, news)


if __name__ == "__main__":
    run_child(main)
