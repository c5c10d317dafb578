"""Server-sent events, and clients that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvloom.api.errors import RequestTimeout, error_object, internal_error
from kvloom.journal.log import RecordLog
from kvloom.journal.records import Record
from kvloom.types.errors import KvloomError

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]

SILENT_SECONDS: Final = 15.0  # after which a comment says that the stream lives
RECORDS_AT_ONCE: Final = 200  # records that are sent at once


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the work's result. Cancels the work, and raises ClientDisconnect, if the client hangs up
    first."""
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


class TimeLimit:
    """The time that one request may take, from when this is made. It holds wherever `kept` is entered."""

    def __init__(self, seconds: float | None) -> None:
        """seconds: None for as long as it likes."""
        self._seconds = seconds
        self._until = None if seconds is None else asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Cancels the block if the time is over, and raises RequestTimeout then."""
        try:
            async with asyncio.timeout_at(self._until) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise RequestTimeout(
                f"the request took more than {self._seconds:g} s, which is this server's `request_timeout`"
            ) from None


NO_LIMIT: Final = TimeLimit(None)


def _openai_error(error: KvloomError) -> bytes:
    return b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n"


@dataclass(frozen=True, slots=True)
class EventForm:
    """How a stream of events is written, and how it ends."""

    last: bytes
    """The last event of one that has ended well."""
    error: Callable[[KvloomError], bytes]
    """Returns the event that tells an error."""
    media: str = "text/event-stream"


OPENAI_EVENTS: Final = EventForm(b"data: [DONE]\n\n", _openai_error)


class EventStream(Response):
    """An answer whose events are written one after the other, or by several writers at a time. The headers go
    with the first event, so that an error before it is an answer of its own."""

    def __init__(
        self, opening: Awaitable[Callable[[Write], Awaitable[None]]], form: EventForm = OPENAI_EVENTS
    ) -> None:
        """opening: prepares the answer while the client is there, and returns what writes its events."""
        super().__init__(media_type=form.media, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._opening = opening
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            return

    async def _send_all(self, send: Send) -> None:
        begun, beginning = False, asyncio.Lock()

        async def write(body: bytes, *, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                async with beginning:
                    if not begun:
                        headers = self.raw_headers
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        begun = True
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            events = await self._opening
            await events(write)
            body = self._form.last
        except KvloomError as error:
            if not begun:
                raise
            body = self._form.error(error)
        except Exception as error:
            if not begun:
                raise
            body = self._form.error(internal_error(error))
        await write(body, more=False)


class JournalStream(Response):
    """The journal as server-sent events: what is kept of it, and then what comes."""

    def __init__(self, log: RecordLog, last: str) -> None:
        """last: the id of the last record that the client has; empty for none."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._log = log
        self._place = log.after(last) if last else log.first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        news = asyncio.Event()

        def ring(_: Sequence[Record]) -> None:
            news.set()

        self._log.follow(ring)
        try:
            await while_connected(receive, self._send_all(send, news))
        except ClientDisconnect:
            return
        finally:
            self._log.unfollow(ring)

    async def _send_all(self, send: Send, news: asyncio.Event) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body = b": the journal\n\n"  # so that a client sees at once that it is let in
        while True:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            news.clear()
            body = self._next()
            if body:
                continue
            if self._log.over:
                break
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    await news.wait()
                body = self._next()
            except TimeoutError:
                body = b": nothing new\n\n"
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _next(self) -> bytes:
        """Returns the events of the next records; nothing if there are none. What is not kept any more is
        left out, and a comment says so."""
        missed = self._log.first - self._place
        said = b": %d records are not kept any more\n\n" % missed if missed > 0 else b""
        self._place = max(self._place, self._log.first)
        records = self._log.since(self._place, RECORDS_AT_ONCE)
        self._place += len(records)
        return said + b"".join(map(_record_event, records))


def _record_event(record: Record) -> bytes:
    kind = record.event.__struct_config__.tag
    return f"id: {record.id}\nevent: {kind}\ndata: ".encode() + msgspec.json.encode(record) + b"\n\n"
