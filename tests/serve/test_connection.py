"""Callers that send too slowly, too much or too early, and such as do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from kvloom.api.app import create_app
from kvloom.serve.server import ClientConnection, Connection, HttpServer
from tests.api.scripted import ScriptedEngine, card, tokens
from tests.processes import DEADLINE

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"
WITH_HALF_A_BODY = HEAD + b"content-length: 9\r\n\r\n123"
HELLO = PlainTextResponse("hello")


def run(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the loop that the processes run on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


@asynccontextmanager
async def served(folder: Path, app: ASGIApp) -> AsyncIterator[str]:
    """The path of its socket."""
    path, ready = str(folder / "s"), asyncio.Event()
    server = HttpServer(app, connection=ClientConnection, unix=path, grace=1, ready=ready.set)
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        group.create_task(server.serve())
        await ready.wait()
        yield path
        server.end()


@asynccontextmanager
async def connected(
    folder: Path, app: ASGIApp = HELLO
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with served(folder, app) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        yield reader, writer
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD + b"x-long: 1"])
def test_a_head_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(Connection, "HEAD_SECONDS", 0.05)

    async def play() -> None:
        async with connected(tmp_path) as (reader, writer):
            writer.write(sent)
            said = b"took more than 0.05 s to come." if sent else b""
            assert (await reader.read()).endswith(said)
            assert sent or reader.at_eof()

    run(play)


@pytest.mark.parametrize("piece", [b"x" * 1000, b"1\r\nx-more: " + b"x" * 1000])
def test_a_head_without_end(tmp_path: Path, piece: bytes) -> None:
    async def play() -> None:
        async with connected(tmp_path) as (reader, writer):
            writer.write(HEAD + b"x-long: " + piece * 400)
            assert b" 400 " in await reader.readline()

    run(play)


def test_a_long_head_that_comes_at_once(tmp_path: Path) -> None:
    async def play() -> None:
        async with connected(tmp_path) as (reader, writer):
            writer.write(HEAD + b"x-long: " + b"x" * 100_000 + b"\r\n\r\n")
            assert (await reader.read()).endswith(b"larger than 65536 bytes.")

    run(play)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body, and with the names of the headers."""
    request = Request(scope, receive)
    try:
        body = await request.body()
    except ClientDisconnect:
        return
    await PlainTextResponse(f"{len(body)} {sorted(request.headers)}")(scope, receive, send)


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def test_trailers_are_no_headers(tmp_path: Path) -> None:
    async def play() -> None:
        async with connected(tmp_path, echo) as (reader, writer):
            writer.write(CHUNKED + b"5\r\nhello\r\n0\r\nauthorization: Bearer secret\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head
            assert await reader.readexactly(31) == b"5 ['host', 'transfer-encoding']"

    run(play)


def test_a_body_in_tiny_chunks(tmp_path: Path) -> None:
    async def play() -> None:
        async with connected(tmp_path, echo) as (reader, writer):
            writer.write(CHUNKED + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(6) == b"50000 "

    run(play)


@pytest.mark.parametrize("piece", [b"x-more: " + b"x" * 1000 + b"\r\n", b"x" * 1000])
def test_trailers_without_end(tmp_path: Path, piece: bytes) -> None:
    async def play() -> None:
        async with connected(tmp_path, echo) as (reader, writer):
            writer.write(CHUNKED + b"5\r\nhello\r\n0\r\n")
            taken = 0
            with suppress(ConnectionError):
                while taken < 10_000_000 and not reader.at_eof():
                    writer.write(piece)
                    await writer.drain()
                    taken += len(piece)
            assert taken < 10_000_000

    run(play)


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

    run(play)


@pytest.mark.parametrize(
    "early", [HEAD + b"\r\n", HEAD, b"G", b"\0\0", HEAD + b"content-length: 9\r\n\r\n123"]
)
def test_a_hang_up_behind_an_early_request(tmp_path: Path, early: bytes) -> None:
    """It is noticed while the first request is being answered, and the second is never begun."""
    begun: list[str] = []
    hung_up = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        hung_up.set()

    async def play() -> None:
        async with connected(tmp_path, app) as (reader, writer):
            writer.write(HEAD + b"\r\n" + early)
            await reader.readuntil(b"first")
            writer.write(b"x" * 1000)
            writer.transport.abort()
            await hung_up.wait()
        assert begun == ["/"]

    run(play)


@pytest.mark.parametrize("early", [HEAD + b"\r\n", b"G", b"\0\0", WITH_HALF_A_BODY])
def test_an_early_request_is_not_answered(tmp_path: Path, early: bytes) -> None:
    """The first is, in full, and says that no other will be."""

    async def play() -> None:
        async with connected(tmp_path) as (reader, writer):
            writer.write(HEAD + b"\r\n" + early)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in head
        assert body == b"hello"

    run(play)


def test_a_client_that_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends in the engine, and long before all is said."""
    monkeypatch.setattr(ClientConnection, "READ_SECONDS", 0.05)
    most = 1 << 16
    engine = ScriptedEngine(lambda *_: tokens("a") * most, [card(context_length=2 * most)])
    ask = {"model": "tiny", "prompt": "hi", "max_tokens": most, "stream": True}
    body = json.dumps(ask).encode()

    async def play() -> None:
        async with served(tmp_path, create_app(engine)) as path:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
                client.sendall(head % len(body) + body)
                assert await asyncio.to_thread(engine.gone.wait, DEADLINE)
                assert engine.closed == [one.request for one in engine.bodies]
                client.setblocking(True)
                assert b"[DONE]" not in await asyncio.to_thread(_all_of, client)

    run(play)


def _all_of(client: socket.socket) -> bytes:
    said = b""
    while piece := client.recv(1 << 20):
        said += piece
    return said


class Pipe(asyncio.Transport):
    """A transport whose buffer the test fills and empties, and a loop whose one timer it lets go off."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = 0
        self.aborted = False
        self.timers: list[Callable[[], None]] = []

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True

    def call_later(self, _: float, do: Callable[..., None], *arguments: object) -> Pipe:
        self.timers = [lambda: do(*arguments)]
        return self

    def cancel(self) -> None:
        self.timers.clear()


def test_a_client_that_reads_slowly() -> None:
    """Each time as much as it must: it is waited for. Then less: it is not."""
    pipe, least = Pipe(), ClientConnection.LEAST_READ
    config = HttpServer(HELLO, grace=1).config
    connection = ClientConnection(config, ServerState(), {}, _loop=pipe)  # type: ignore[arg-type]
    connection.connection_made(pipe)
    pipe.timers.clear()  # the head's
    for _ in range(3):
        pipe.unread = 10 * least
        connection.pause_writing()
        for _ in range(5):
            pipe.unread -= least
            pipe.timers[0]()
        connection.resume_writing()
        assert not pipe.timers
    connection.pause_writing()
    pipe.unread -= least - 1
    assert not pipe.aborted
    pipe.timers[0]()
    assert pipe.aborted
