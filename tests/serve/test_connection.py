"""Heads of requests that never end, or never come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from kvloom.serve.connection import Connection
from kvloom.serve.server import Server

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    path, ready = str(folder / "s"), asyncio.Event()
    server = Server(PlainTextResponse("hello"), unix=path, grace=1, ready=ready.set)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(server.serve())
        await ready.wait()
        reader, writer = await asyncio.open_unix_connection(path)
        yield reader, writer
        writer.close()
        server.end()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD + b"x-long: 1"])
def test_a_head_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(Connection, "HEAD_SECONDS", 0.05)

    async def play() -> None:
        async with connected(tmp_path) as (reader, writer):
            writer.write(sent)
            said = b"took more than 0.05 s to come." if sent else b""
            assert (await reader.read()).endswith(said)
            assert sent or reader.at_eof()

    asyncio.run(play())


@pytest.mark.parametrize("piece", [b"x" * 1000, b"1\r\nx-more: " + b"x" * 1000])
def test_a_head_without_end(tmp_path: Path, piece: bytes) -> None:
    async def play() -> None:
        async with connected(tmp_path) as (reader, writer):
            writer.write(HEAD + b"x-long: " + piece * 400)
            assert b" 400 " in await reader.readline()

    asyncio.run(play())


def test_every_request_of_a_connection_has_its_own_bounds(tmp_path: Path) -> None:
    """Bodies do not count, and the second head starts anew."""

    async def play() -> None:
        async with connected(tmp_path) as (reader, writer):
            for _ in range(3):
                size = Connection.MAX_HEAD - 1000
                writer.write(HEAD + b"content-length: %d\r\nx-long: %b\r\n\r\n" % (size, b"x" * size))
                writer.write(b"x" * size)
                assert b" 200 " in await reader.readline()
                assert (await reader.readuntil(b"hello")).endswith(b"hello")

    asyncio.run(play())
