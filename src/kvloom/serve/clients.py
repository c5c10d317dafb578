"""A gateway's connections to engines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from kvloom.router.client import UNIX, HttpEngineClient


class Clients:
    """An async context manager, which closes all. urls: of the units that are known already; others serve at
    a path of their own among `sockets`. A unit that went and comes again has the client that it had."""

    def __init__(self, urls: Mapping[str, str], sockets: str, secret: str) -> None:
        self._urls = urls
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

    async def of(self, unit: str) -> HttpEngineClient:
        if unit not in self._clients:
            url = self._urls.get(unit, f"{UNIX}{self._sockets}/{unit}.sock")
            client = self._clients[unit] = HttpEngineClient(url, secret=self._secret)
            await self._stack.enter_async_context(client)
        return self._clients[unit]
