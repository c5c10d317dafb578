"""A stream over HTTP that its caller does not read: the engine's own part of it (law 2)."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from kvloom.api.verbs import create_verbs
from kvloom.serve.server import HttpServer
from kvloom.types.request import PROTOCOL, Event
from tests.engine.plays import check, order
from tests.engines import Answer
from tests.modelled import ModelledExecutor, ask, engine_over, modelled, turns

MODEL, CONTEXT = "thin", 400  # a block a page, of two tokens
BUFFER = 4096
SECRET = "s"


async def unchunked(reader: asyncio.StreamReader) -> bytes:
    """The rest of a body that comes in chunks."""
    whole = b""
    while size := int(await reader.readline(), 16):
        whole += await reader.readexactly(size)
        await reader.readline()
    return whole


def test_an_unread_stream_stands_still_and_is_whole_when_it_is_read() -> None:
    executor = ModelledExecutor(6000, models=(MODEL,), context=CONTEXT)
    engine = engine_over(executor)
    body = order("unread", MODEL, 20, n=32, max_tokens=300)
    other = order("other", MODEL, 20, n=2, max_tokens=50)
    asked = msgspec.json.encode(body)
    head = (
        f"POST /verbs/start_generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SECRET}\r\n"
        f"kvloom-protocol: {PROTOCOL}\r\ncontent-type: application/json\r\naccept: application/json\r\n"
        f"content-length: {len(asked)}\r\nconnection: close\r\n\r\n"
    ).encode()

    async def play(listener: socket.socket) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            client.connect(listener.getsockname())
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client, limit=BUFFER)
            writer.write(head + asked)
            await reader.readuntil(b"\r\n\r\n")
            while not (await engine.load()).models[MODEL].used_blocks:
                await turns(1)
            while (await engine.load()).models[MODEL].used_blocks:  # it stands still in the end
                await turns(10)
            made = sum(job.tokens.size for job in executor.jobs)
            assert made < 0.7 * body.n * body.sampling.max_tokens, made
            check(executor, other, await ask(engine, other), whole=True)
            answer = Answer()
            for line in (await unchunked(reader)).splitlines():
                answer.take(msgspec.json.decode(line, type=list[Event]))
            check(executor, body, answer, whole=True)
            writer.close()

    async def whole() -> None:
        ready = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            server = HttpServer(create_verbs(engine, secret=SECRET), grace=1, ready=ready.set)
            async with modelled(engine, executor), asyncio.TaskGroup() as group:
                group.create_task(server.serve(sockets=[listener]))
                await ready.wait()
                await play(listener)
                server.end()

    asyncio.run(whole())
