"""Calls to an engine of the virtual world: direct, with the time that a wire takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.load import UnitLoad
from kvloom.types.request import Event, ModelCard, StartGenerate
from kvloom.types.verbs import (
    Held,
    Lease,
    Offer,
    Offered,
    Pin,
    Pinned,
    Prefix,
    Prepared,
    PrepRecv,
    RemoteSend,
    Sent,
    Standing,
)

T = TypeVar("T")


class ModelledWire:
    """Satisfies `EngineClient`. reach: the engine that there is now; raises Unavailable where there is none.
    delay: seconds of one way. A stream's frames come without one, so that they keep their distances; its
    first one has both ways behind it."""

    def __init__(self, reach: Callable[[], EngineClient], clock: Clock, delay: float) -> None:
        self._reach = reach
        self._clock = clock
        self._delay = delay

    async def _there_and_back(self, call: Callable[[EngineClient], Awaitable[T]]) -> T:
        await self._clock.sleep(self._delay)
        answer = await call(self._reach())
        await self._clock.sleep(self._delay)
        return answer

    async def models(self) -> list[ModelCard]:
        return await self._there_and_back(lambda engine: engine.models())

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        await self._clock.sleep(2 * self._delay)
        async with aclosing(self._reach().start_generate(body)) as frames:
            async for frame in frames:
                yield frame

    async def abort(self, request: str, choice: int | None = None) -> None:
        await self._there_and_back(lambda engine: engine.abort(request, choice))

    async def prep_recv(self, body: PrepRecv) -> Prepared:
        return await self._there_and_back(lambda engine: engine.prep_recv(body))

    async def remote_send(self, body: RemoteSend) -> Sent:
        return await self._there_and_back(lambda engine: engine.remote_send(body))

    async def renew(self, request: str) -> Lease:
        return await self._there_and_back(lambda engine: engine.renew(request))

    async def pin(self, body: Pin) -> Pinned:
        return await self._there_and_back(lambda engine: engine.pin(body))

    async def unpin(self, request: str) -> Held:
        return await self._there_and_back(lambda engine: engine.unpin(request))

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        return await self._there_and_back(lambda engine: engine.hold(request, sends))

    async def resume(self, request: str) -> None:
        await self._there_and_back(lambda engine: engine.resume(request))

    async def offer(self, body: Offer) -> Offered:
        return await self._there_and_back(lambda engine: engine.offer(body))

    async def evict(self, body: Prefix) -> Held:
        return await self._there_and_back(lambda engine: engine.evict(body))

    async def load(self) -> UnitLoad:
        return await self._there_and_back(lambda engine: engine.load())
