"""The process of a host's keeper: `python -m kvloom.serve.nodes.keeper_process`.

It reads a `KeeperOrder` from its stdin, prints the address at which controllers find it, and then nothing
more.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvloom.config.machine import Machine
from kvloom.serve.local import ENGINE_MODULE
from kvloom.serve.machine import private_folder, raise_open_files
from kvloom.serve.nodes.agent import KeeperOrder, keeper_lock, keeper_log
from kvloom.serve.nodes.detached import claim
from kvloom.serve.nodes.keeper import Keeper, Place
from kvloom.serve.processes.forkserver import ForkServer
from kvloom.serve.processes.lease import wait_until_none_runs
from kvloom.serve.processes.log import log_to_stderr
from kvloom.types.clock import WallClock


async def keep(order: KeeperOrder) -> None:
    """Keeps the host's part of the fleet until it is over. Raises ConfigError if another keeper does."""
    clock = WallClock()
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder())
        lock = keeper_lock(order.fleet)
        running = lock.with_name(f"{lock.name}.running")
        await asyncio.to_thread(wait_until_none_runs, running)
        here = Place(order.host, folder, order.identity.keep(folder), order.secret, running)
        async with asyncio.TaskGroup() as tasks:
            forks = ForkServer([ENGINE_MODULE], clock, lambda name, line: print(name, line, file=sys.stderr))
            forking = tasks.create_task(forks.run())
            keeper = Keeper(here, Machine.here(), tasks, clock, forks.start)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, keeper.end)

            def ready(address: str) -> None:
                claim(lock, address, "a keeper of the fleet")
                stack.callback(_leave_nothing, lock, running)

            await keeper.serve(ready)
            forking.cancel()


def _leave_nothing(lock: Path, running: Path) -> None:
    """Removes the keeper's files, but for its log if something stands there."""
    for file in (lock, running):
        file.unlink(missing_ok=True)
    log = keeper_log(lock)
    if log.exists() and not log.stat().st_size:
        log.unlink()


def main() -> None:
    log_to_stderr()
    raise_open_files()
    asyncio.run(keep(msgspec.json.decode(sys.stdin.buffer.readline(), type=KeeperOrder)))


if __name__ == "__main__":
    main()
