"""What a service manager is told, over a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvloom.serve.systemd import ALIVE, READY, STOPPING, ServiceManager
from kvloom.types.clock import WallClock
from tests.processes import DEADLINE


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket, and the address that it names."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@kvloom-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("\0" + address[1:] if address[0] == "@" else address)
        end.settimeout(DEADLINE)
        yield end, address


def test_it_is_told_what_becomes_of_the_process(manager: tuple[socket.socket, str]) -> None:
    end, address = manager
    environment = {"NOTIFY_SOCKET": address, "HOME": "/"}
    told = ServiceManager.named_by(environment)
    assert environment == {"HOME": "/"}
    assert told.interval is None
    asyncio.run(told.keep_told(WallClock()))  # which is over, because nobody wants it
    told.tell(READY)
    told.tell(STOPPING)
    assert [end.recv(100) for _ in range(2)] == [b"READY=1", b"STOPPING=1"]


def test_it_is_told_that_the_process_lives_twice_as_often_as_it_must(
    manager: tuple[socket.socket, str],
) -> None:
    end, address = manager

    class Counting(WallClock):
        slept: list[float] = []  # noqa: RUF012

        async def sleep(self, seconds: float) -> None:
            self.slept.append(seconds)
            if len(self.slept) == 3:
                raise asyncio.CancelledError

    told = ServiceManager.named_by(
        {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(told.keep_told(Counting()))
    assert [end.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    assert Counting.slept == [15.0] * 3


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "vsock:2:1234", "WATCHDOG_USEC": "1000000"},
        {"WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
    ],
)
def test_where_nobody_asks_for_signs_of_life_there_are_none(environment: dict[str, str]) -> None:
    told = ServiceManager.named_by(environment)
    assert told.interval is None
    told.tell(READY)


def test_one_that_reads_nothing_holds_nobody_up(manager: tuple[socket.socket, str]) -> None:
    end, address = manager
    told = ServiceManager(address)
    for _ in range(5000):
        told.tell(ALIVE)
    end.setblocking(False)
    read = 0
    with suppress(BlockingIOError):
        while end.recv(100):
            read += 1
    assert 0 < read < 5000
