"""A process for the launcher's tests: `python -m tests.serve.launched FD NAME`. Its option `lives` says what
each life does, the first start's first: `ready`, `held` until it is told what the fleet is, `load` for ever,
`refuse` or `die`. It ends when it is to retire."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from kvloom.cluster.launcher import Snapshot
from kvloom.serve.processes.messages import GatewayOrder, News, Ready, RetireOrder, StartProgress
from kvloom.serve.processes.parent import Parent, run_child
from kvloom.types.errors import ConfigError


def main(parent: Parent) -> None:
    order = parent.order(GatewayOrder)
    print("pid", os.getpid())
    lives = order.program.options["lives"]
    assert isinstance(lives, list)
    started = Path(order.folder, "started")
    number = len(started.read_text()) if started.exists() else 0
    started.write_text("x" * (number + 1))
    match lives[min(number, len(lives) - 1)]:
        case "refuse":
            raise ConfigError("this is no good")
        case "die":
            raise SystemExit(3)
        case "load":
            parent.report(StartProgress("loading"))
            signal.pause()
        case "held":
            parent.report(StartProgress("waiting"))
            parent.order(Snapshot)
    parent.watch(Path(order.sockets), heed)
    asyncio.run(serve(parent, str(Path(order.sockets, f"{sys.argv[2]}.sock"))))


def heed(news: News) -> None:
    if isinstance(news, RetireOrder):
        os.kill(os.getpid(), signal.SIGTERM)


async def serve(parent: Parent, path: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with await asyncio.start_unix_server(answer, path):
        parent.report(Ready(("chatty",)))
        await told.wait()


if __name__ == "__main__":
    run_child(main)
