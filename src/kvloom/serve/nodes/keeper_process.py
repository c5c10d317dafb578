"""The process of a host's keeper: `python -m kvloom.serve.nodes.keeper_process`.

It reads a `KeeperOrder` from its stdin, prints the address at which controllers find it, and says nothing to
who has started it any more.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from pathlib import Path

import msgspec

from kvloom.config.machine import Machine
from kvloom.serve.local import ENGINE_MODULE
from kvloom.serve.machine import private_folder, raise_open_files
from kvloom.serve.nodes.agent import KeeperOrder, place
from kvloom.serve.nodes.keeper import Keeper, Place
from kvloom.serve.processes.forkserver import ForkServer
from kvloom.serve.processes.log import log_to_stderr
from kvloom.types.clock import WallClock
from kvloom.types.errors import ConfigError


async def keep(order: KeeperOrder) -> None:
    """Keeps the host's part of the fleet until it is over. Raises ConfigError if another keeper does."""
    clock = WallClock()
    with private_folder() as folder:
        here = Place(order.host, folder, order.identity.keep(folder), order.secret)
        async with asyncio.TaskGroup() as tasks:
            forks = ForkServer([ENGINE_MODULE], clock, lambda name, line: print(name, line, file=sys.stderr))
            forking = tasks.create_task(forks.run())
            keeper = Keeper(here, Machine.here(), tasks, clock, forks.start)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, keeper.end)
            await keeper.serve(lambda address: _tell(order.fleet, address))
            forking.cancel()
    _leave_nothing(place(order.fleet))


def _tell(fleet: str, address: str) -> None:
    """Tells who has started this process where it is, and whoever looks for it later. Raises ConfigError if
    another one runs."""
    file = os.open(place(fleet), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError as error:
        raise ConfigError("this host has a keeper of the fleet already; one is right") from error
    if not os.fstat(file).st_nlink:
        raise ConfigError("this host's keeper of the fleet has just ended; another attempt is right")
    os.truncate(file, 0)
    os.write(file, address.encode())
    print(address, flush=True)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, sys.stdout.fileno())
    os.close(silent)


def _leave_nothing(place: Path) -> None:
    """Removes the file by which the keeper is found, and its log, unless something stands there."""
    place.unlink(missing_ok=True)
    log = place.with_suffix(".log")
    if log.exists() and not log.stat().st_size:
        log.unlink()


def main() -> None:
    log_to_stderr()
    raise_open_files()
    asyncio.run(keep(msgspec.json.decode(sys.stdin.buffer.readline(), type=KeeperOrder)))


if __name__ == "__main__":
    main()
