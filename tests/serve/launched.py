"""A process for the launcher's tests: `python -m tests.serve.launched FD NAME`. Its option `lives` says what
each life does, the first start's first: `ready`, `held` until it is told what the fleet is, `load` for ever,
`refuse` or `die`; `stuck` is ready, and its event loop stands still from then on; `mute` gives no sign of
life. It ends when it is to retire."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from kvloom.cluster.launcher import Snapshot
from kvloom.serve.processes.messages import GatewayOrder, Ready, RetireOrder, StartProgress, Told
from kvloom.serve.processes.parent import Parent, run_child
from kvloom.types.errors import ConfigError

BEAT_SECONDS = 0.01


def main(parent: Parent) -> None:
    order = parent.next_order(GatewayOrder)
    print("pid", os.getpid())
    lives = order.program.options["lives"]
    assert isinstance(lives, list)
    started = Path(order.folder, "started")
    number = len(started.read_text()) if started.exists() else 0
    started.write_text("x" * (number + 1))
    life = lives[min(number, len(lives) - 1)]
    match life:
        case "refuse":
            raise ConfigError("this is no good")
        case "die":
            raise SystemExit(3)
        case "load":
            parent.report(StartProgress("loading"))
            signal.pause()
        case "held":
            parent.report(StartProgress("waiting"))
            parent.next_order(Snapshot)
    parent.watch(Path(order.sockets), heed)
    asyncio.run(serve(parent, life))


def heed(news: Told) -> None:
    if isinstance(news, RetireOrder):
        os.kill(os.getpid(), signal.SIGTERM)


async def serve(parent: Parent, life: str) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with asyncio.TaskGroup() as tasks:
        beating = [tasks.create_task(parent.beat(seconds=BEAT_SECONDS))] if life != "mute" else []
        parent.report(Ready({"chatty": "chat/completions"}))
        if life == "stuck":
            stand_still()
        await told.wait()
        for beat in beating:
            beat.cancel()


def stand_still() -> None:
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    run_child(main)
