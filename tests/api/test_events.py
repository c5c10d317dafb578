"""The journal over HTTP: what is kept, what comes, and its end."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message

from kvloom.api.stream import JournalStream
from kvloom.journal.log import Journal
from kvloom.journal.records import Preempted
from tests.modelled_units import ManualClock


class Client:
    """It reads as long as it is let, and never hangs up."""

    def __init__(self, journal: Journal, last: str = "") -> None:
        self.said = b""
        self.over = False
        self._news = asyncio.Event()
        self._stream = JournalStream(journal, last)

    async def read(self) -> None:
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/admin/events", "headers": []}
        await self._stream(scope, self._receive, self._send)

    async def until(self, count: int) -> None:
        """Waits for so many events."""
        while self.said.count(b"\ndata: ") < count:
            self._news.clear()
            await self._news.wait()

    async def _receive(self) -> Message:
        hung_up: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await hung_up

    async def _send(self, message: Message) -> None:
        self.said += message.get("body", b"")
        self.over = message["type"] == "http.response.body" and not message["more_body"]
        self._news.set()


def lose(journal: Journal, request: str) -> None:
    journal.add("unit-0", Preempted(model="m", request=request, reason="line one\nline two"))


def test_a_stream_has_what_is_kept_then_what_comes_and_ends_with_the_journal() -> None:
    async def main() -> None:
        journal = Journal(ManualClock(), most=3)
        for name in "abcd":
            lose(journal, name)
        client, later = Client(journal), Client(journal, "0-3")
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(client.read())
            tasks.create_task(later.read())
            await client.until(3)
            lose(journal, "e")
            await client.until(4)
            await later.until(2)
            journal.close()
        assert client.over
        assert later.over
        assert later.said.startswith(b": the journal\n\nid: 0-4\nevent: preempted\ndata: {")
        events = [one for one in client.said.split(b"\n\n") if one.startswith(b"id: ")]
        assert [one.split(b"\n")[0] for one in events] == [b"id: 0-2", b"id: 0-3", b"id: 0-4", b"id: 0-5"]
        assert all(one.count(b"\n") == 2 for one in events)  # a reason's own line ends are escaped

    asyncio.run(main())
