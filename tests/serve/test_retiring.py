"""A server whose place another one has taken answers all that had reached it, and then ends. One that ends
tells who still waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from kvloom.serve import server as server_module
from kvloom.serve.gateway_process import GRACE_SECONDS, end_streams
from kvloom.serve.server import ClientConnection, HttpServer
from tests.processes import DEADLINE
from tests.router import fleets
from tests.serve.test_connection import HEAD, run

LAST = b"ended\r\n0\r\n\r\n"
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Slow:
    """An app whose answers begin at once and end once `gate` is open. cut: those that never did."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.cut = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cut += 1
            raise
        await send({"type": "http.response.body", "body": b"ended"})


@asynccontextmanager
async def serving(folder: Path, app: Slow) -> AsyncIterator[tuple[HttpServer, asyncio.Task[None], str]]:
    """Ends with the server, which is to end by itself."""
    path, ready = str(folder / "s"), asyncio.Event()
    server = HttpServer(app, connection=ClientConnection, unix=path, grace=0, ready=ready.set)
    async with asyncio.timeout(DEADLINE):
        task = asyncio.create_task(server.serve())
        await ready.wait()
        yield server, task, path
        await task


async def asked(line: Line) -> bytes:
    """A request on its way; its answer's head."""
    line[1].write(HEAD + b"\r\n")
    head = await line[0].readuntil(b"\r\n\r\n")
    await line[0].readuntil(b"begun")
    return head


def test_whoever_is_connected_is_answered_once_more(tmp_path: Path) -> None:
    async def play() -> None:
        app = Slow()
        async with serving(tmp_path, app) as (server, task, path):
            under_way, kept, fresh = [await asyncio.open_unix_connection(path) for _ in range(3)]
            await asked(under_way)
            app.gate.set()
            assert b"connection: close" not in await asked(kept)
            await kept[0].readuntil(LAST)
            app.gate.clear()
            assert b"connection: close" not in await asked(under_way)
            server.retire(60)
            with pytest.raises(OSError, match="refused"):
                await asyncio.open_unix_connection(path)
            for line in (kept, fresh):
                assert b"connection: close" in await asked(line)
            assert not task.done()
            app.gate.set()
            for reader, _ in (under_way, kept, fresh):
                assert (await reader.read()).endswith(LAST)  # and then it is closed
            await task
            assert app.cut == 0

    run(play)


def test_an_answer_that_has_not_begun(tmp_path: Path) -> None:
    """Its caller is told, as OpenAI writes errors, and may ask another server."""

    class Silent(Slow):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                self.gate.set()
                await asyncio.Event().wait()

    async def play() -> None:
        app = Silent()
        async with serving(tmp_path, app) as (server, _, path):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(HEAD + b"\r\n")
            await app.gate.wait()
            server.end()
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in answer
            assert b'"message":"the server is stopping"' in answer

    run(play)


@pytest.mark.parametrize("told", [False, True])
def test_an_answer_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """It is cut off when the time is over, or the server is told to end."""
    monkeypatch.setattr(server_module, "LINGER_SECONDS", 0.01)

    async def play() -> None:
        app = Slow()
        async with serving(tmp_path, app) as (server, _, path):
            reader, writer = await asyncio.open_unix_connection(path)
            await asked((reader, writer))
            server.retire(60 if told else 0)
            if told:
                server.end()
            await reader.read()
            writer.close()
        assert app.cut == 1

    run(play)


def test_what_has_not_ended_by_itself_is_ended_before_the_grace_is_over() -> None:
    async def test() -> None:
        async with fleets.routed(1) as made:
            [engine] = made.engines
            ending = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(end_streams(made.router, ending, made.clock))
                engine.gate.clear()
                asked = [group.create_task(fleets.ask(made.router, fleets.body())) for _ in range(3)]
                await fleets.turns()
                ending.set()
                await fleets.turns()
                await made.clock.advance(0.49 * GRACE_SECONDS)
                assert not any(one.done() for one in asked)
                await made.clock.advance(0.02 * GRACE_SECONDS)
                await fleets.turns()
                engine.gate.set()
            assert {end.reason for one in asked for end in one.result().ends.values()} == {"abort"}

    fleets.run(test)
