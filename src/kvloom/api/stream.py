"""Server-sent events, several streams at once, and clients that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvloom.api.errors import error_object, internal_error
from kvloom.types.errors import KvloomError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
AT_ONCE = 128  # streams of one request that run at the same time


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; cancels the work, and raises ClientDisconnect, when the client hangs up first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends its headers with the first event, so that an error before it is an answer of its own."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            body = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            try:
                async for body in events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                body = DONE
            except KvloomError as error:
                body = _error_event(error)
            except Exception as error:  # noqa: BLE001 -- logged, and told to the client without its text
                body = _error_event(internal_error(error))
            await send({"type": "http.response.body", "body": body, "more_body": False})


def _error_event(error: KvloomError) -> bytes:
    return b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n"


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's number. The first error ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(AT_ONCE)
    room = asyncio.Semaphore(AT_ONCE)
    tasks = [asyncio.create_task(_pump(at, stream, queue, room)) for at, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            if got is None:
                left -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    at: int,
    stream: AsyncGenerator[T, None],
    queue: asyncio.Queue[tuple[int, T] | Exception | None],
    room: asyncio.Semaphore,
) -> None:
    try:
        async with room, aclosing(stream):
            async for item in stream:
                await queue.put((at, item))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 -- the one who reads the queue raises it
        await queue.put(error)
