"""Requests begin by turns, so that a burst of them holds up nobody else."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloom.api.access.proxies import network_of
from kvloom.types.errors import QueueFull

MOST_BEGUN: Final = 8
"""Requests that begin in one pass of the event loop: some milliseconds' work."""
LARGE: Final = 64 << 10
"""Bytes of a body that may take more than a millisecond to read."""
REST: Final = 6
"""The event loop is left to others for so many times the time for which a piece of work has held it. What a
body asks for takes about as long to prepare as to read, so large bodies have two sevenths of the loop."""

T = TypeVar("T")


class Turns:
    """A number of turns. A caller that has taken one gives it back. Tenants that wait get them in turn (round
    robin; Nagle, "On Packet Switches with Infinite Storage", RFC 970), and within a tenant the first to come
    is first."""

    def __init__(self, free: int, most: int | None = None) -> None:
        """most: callers of one tenant that may wait."""
        self.free = free
        self._most = most
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant; none is empty

    async def take(self, tenant: str) -> None:
        """Waits for a turn. Who is cancelled meanwhile has none. Raises QueueFull."""
        if self.free > 0:  # then nobody waits
            self.free -= 1
            return
        line = self._lines.get(tenant, deque())
        if len(line) == self._most:
            raise QueueFull(f"{self._most} requests of this caller wait for the same already", retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._lines[tenant] = line
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            else:
                self.give()
            raise

    def give(self, count: int = 1) -> None:
        """Gives turns back, or out to those that wait."""
        self.free += count
        while self.free > 0 and self._lines:
            tenant, line = next(iter(self._lines.items()))
            del self._lines[tenant]
            turn = line.popleft()
            if line:
                self._lines[tenant] = line  # behind the others
            if not turn.done():  # it may have been cancelled just now
                turn.set_result(None)
                self.free -= 1

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant, deque())
        if turn in line:
            line.remove(turn)
            if not line:
                del self._lines[tenant]


class TakeTurns:
    """An ASGI middleware that lets few requests with a body begin in one pass of the event loop. They begin
    when the whole body has come. Addresses take turns. Requests that only ask how things stand (GET) never
    wait.

    To begin a completion, which is to read the body, to render and to call an engine, takes some tenths of a
    millisecond of the loop. Without turns, all of a burst begin in one pass of the loop, and whoever comes
    meanwhile waits for the whole of it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns(MOST_BEGUN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        client, begun = scope.get("client"), False

        async def whole() -> Message:
            nonlocal begun
            message = await receive()
            if not begun and not message.get("more_body"):
                begun = True
                await self._begin(network_of(client[0]) if client else "")
            return message

        await self._app(scope, whole, send)

    async def _begin(self, address: str) -> None:
        """Waits for a turn."""
        if self._turns.free >= MOST_BEGUN:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._next, loop)
        await self._turns.take(address)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets the next ones begin, in a new pass of the loop."""
        self._turns.give(MOST_BEGUN - self._turns.free)
        if self._turns.free < MOST_BEGUN:
            loop.call_soon(self._next, loop)


class Pace:
    """Does long pieces of work on the event loop one at a time, tenants in turn, with a rest after each."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """now: tells seconds, also in the middle of a pass of the loop."""
        self._now = now
        self._turns = Turns(1)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Returns what the work does, when its turn has come."""
        await self._turns.take(tenant)
        begun = self._now()
        try:
            return work()
        finally:
            rest = REST * (self._now() - begun)
            asyncio.get_running_loop().call_later(rest, self._turns.give)
