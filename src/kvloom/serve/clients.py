"""A gateway's connections to engines."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from kvloom.router.client import UNIX, HttpEngineClient


class Clients:
    """An async context manager, which closes all. A unit that went and comes again has the client that it
    had."""

    def __init__(self, sockets: str, secret: str) -> None:
        """sockets: the folder in which each unit serves at a path of its own."""
        self._sockets = sockets
        self._secret = secret
        self._stack = AsyncExitStack()
        self._clients: dict[str, HttpEngineClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def of(self, unit: str) -> HttpEngineClient:
        """Returns the unit's client, whether it has a process or not."""
        if unit not in self._clients:
            client = HttpEngineClient(f"{UNIX}{self._sockets}/{unit}.sock", secret=self._secret)
            self._clients[unit] = client.open()
            self._stack.push_async_exit(client)
        return self._clients[unit]
