"""Requests begin by turns, so that a burst of them holds up nobody else."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.access.proxies import network_of

BEGUN: Final = 8
"""Requests that begin in one turn of the event loop: some milliseconds' work."""


class TakeTurns:
    """An ASGI middleware that lets few requests with a body begin in one turn of the event loop. Addresses
    take turns, and within an address who comes first begins first. Requests that only ask how things stand
    (GET) never wait.

    To begin a completion, which is to read the body, to render and to call an engine, takes some tenths of a
    millisecond of the loop. Without turns, all of a burst begin in one turn of the loop, and whoever comes
    meanwhile waits for the whole of it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun = 0
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by address; none is empty

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            client = scope.get("client")
            await self._turn(network_of(client[0]) if client else "")
        await self._app(scope, receive, send)

    async def _turn(self, address: str) -> None:
        """Waits until the request may begin."""
        loop = asyncio.get_running_loop()
        if self._begun == 0:
            loop.call_soon(self._next, loop)
        if self._begun < BEGUN and not self._lines:
            self._begun += 1
            return
        turn = loop.create_future()
        self._lines.setdefault(address, deque()).append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets the next ones begin, in a new turn of the loop."""
        self._begun = 0
        while self._lines and self._begun < BEGUN:
            address, line = next(iter(self._lines.items()))
            del self._lines[address]
            turn = line.popleft()
            if line:
                self._lines[address] = line  # behind the others
            if not turn.done():  # it may have been cancelled
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            loop.call_soon(self._next, loop)
