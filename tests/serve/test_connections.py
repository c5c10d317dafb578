"""How many connections an address may have open, and all of them together."""

from __future__ import annotations

import asyncio
import resource
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.responses import PlainTextResponse

from kvloom.serve.connections import FILES_EACH, RESERVED, SPARE_FILES, OpenConnections, most_connections
from kvloom.serve.machine import listen_inside
from kvloom.serve.server import ClientConnection, HttpServer
from tests.processes import DEADLINE

MOST = 3
ASKED = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


@asynccontextmanager
async def served(
    *listeners: socket.socket, proxies: Sequence[str] = (), most: int | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Where the first of them listens."""
    ready = asyncio.Event()
    server = HttpServer(
        PlainTextResponse("hello"),
        connection=ClientConnection,
        connections=OpenConnections(MOST, proxies, most),
        grace=1,
        ready=ready.set,
    )
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=list(listeners)))
        await ready.wait()
        yield listeners[0].getsockname()
        server.end()


async def asked(pair: Pair) -> bytes:
    """Asks, and returns the first line of the answer and its body."""
    reader, writer = pair
    writer.write(ASKED)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"length" in line)
    return head.splitlines()[0] + b" " + await reader.readexactly(length)


def test_an_address_with_too_many_connections() -> None:
    """It is told why, and served again once one of its connections has closed; others never notice."""

    async def play() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with served(listener) as (host, port):
                held = [await asyncio.open_connection(host, port) for _ in range(MOST)]
                for pair in held:
                    assert (await asked(pair)).endswith(b" hello")
                for _ in range(2 * MOST):
                    reader, writer = await asyncio.open_connection(host, port)
                    said = await reader.read()  # to its end, though nothing was asked
                    assert b" 503 " in said.splitlines()[0]
                    assert b"3 connections from 127.0.0.1 are open" in said
                    writer.close()
                other = await asyncio.open_connection(host, port, local_addr=("127.0.0.2", 0))
                assert (await asked(other)).endswith(b" hello")
                held[0][1].close()
                await held[0][1].wait_closed()
                answer = b" 503 "
                while b" 503 " in answer:  # until the server has seen it
                    pair = await asyncio.open_connection(host, port)
                    try:
                        answer = await asked(pair)
                    except (ConnectionError, asyncio.IncompleteReadError):
                        continue
                assert answer.endswith(b" hello")
                for _, writer in *held, other, pair:
                    writer.close()

    run(play)


def test_the_fleets_own_processes_get_in_when_nobody_else_does(tmp_path: Path) -> None:
    async def play() -> None:
        path = tmp_path / "gateway"
        with socket.create_server(("127.0.0.1", 0)) as listener, listen_inside(path) as inside:
            async with served(listener, inside, most=1) as (host, port):
                held = await asyncio.open_connection(host, port)
                assert (await asked(held)).endswith(b" hello")
                refused = await asyncio.open_connection(host, port)
                assert b"1 connections are open" in await refused[0].read()
                pairs = [await asyncio.open_unix_connection(path) for _ in range(2 * MOST)]
                for pair in pairs:
                    assert (await asked(pair)).endswith(b" hello")
                for _, writer in held, refused, *pairs:
                    writer.close()

    run(play)


def test_a_proxy_has_as_many_as_it_needs() -> None:
    async def play() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with served(listener, proxies=["127.0.0.0/31"]) as (host, port):
                pairs = [await asyncio.open_connection(host, port) for _ in range(3 * MOST)]
                for pair in pairs:
                    assert (await asked(pair)).endswith(b" hello")
                for _, writer in pairs:
                    writer.close()

    run(play)


def test_all_connections_have_a_bound_too() -> None:
    counted = OpenConnections(each=1000, most=6)
    assert [counted.enter("10.0.0.1") is None for _ in range(4)] == [True, True, True, False]  # half of all
    assert [counted.enter(f"10.0.1.{i}") is None for i in range(3)] == [True, True, False]
    assert "5 connections are open" in str(counted.enter("10.0.0.9"))
    counted.leave("10.0.1.0")
    assert counted.enter("10.0.0.9") is None


@pytest.mark.parametrize("here", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_the_last_ones_are_for_this_machine(here: str) -> None:
    """They are for its own callers, and for no proxy on it, which may speak for anybody."""
    counted = OpenConnections(each=1000, proxies=["127.0.0.2"], most=100)
    for i in range(100 - RESERVED - 1):
        assert counted.enter(f"10.0.1.{i}") is None
    assert counted.enter("127.0.0.2") is None
    for other in ("127.0.0.2", "10.0.2.1", "::2", "unknown"):
        assert "84 connections are open" in str(counted.enter(other))
    assert [counted.enter(here) for _ in range(RESERVED)] == [None] * RESERVED
    assert "100 connections are open" in str(counted.enter(here))
    counted.leave(here)
    assert counted.enter("10.0.2.1") is not None
    assert counted.enter(here) is None


def test_addresses_without_number_take_bounded_memory() -> None:
    counted = OpenConnections(each=1, proxies=[], most=10)

    def come_and_go(first: int) -> int:
        for i in range(first, first + 4000):
            address = f"10.{i >> 16}.{(i >> 8) & 255}.{i & 255}"
            assert counted.enter(address) is None
            counted.leave(address)
        return tracemalloc.get_traced_memory()[0]

    come_and_go(0)
    tracemalloc.start()
    try:
        before = come_and_go(10_000)
        assert come_and_go(20_000) - before < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),  # of one subscriber
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_which_addresses_count_as_one(one: str, other: str, same: bool) -> None:
    counted = OpenConnections(each=1, most=10)
    assert counted.enter(one) is None
    assert (counted.enter(other) is None) != same
    counted.leave(one)
    assert counted.enter(one) is None


def test_there_are_open_files_for_all_connections() -> None:
    most, (soft, hard) = most_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == resource.RLIM_INFINITY or most * FILES_EACH + SPARE_FILES <= max(soft, 256)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert most_connections() == (1024 - SPARE_FILES) // FILES_EACH
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
