"""Calls to an engine of the virtual world: direct, with the time that a wire takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.request import Event, StartGenerate
from kvloom.types.verbs import Answer, Body, RemoteEngine, Verb


class ModelledWire(RemoteEngine):
    """Satisfies `EngineClient`. reach: the engine that there is now; raises Unavailable where there is none.
    delay: seconds of one way. A stream's frames come without one, so that they keep their distances; its
    first one has both ways behind it."""

    def __init__(self, reach: Callable[[], EngineClient], clock: Clock, delay: float) -> None:
        self._reach = reach
        self._clock = clock
        self._delay = delay

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        await self._clock.sleep(self._delay)
        answer = await verb.ask(self._reach(), body)
        await self._clock.sleep(self._delay)
        return answer

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        await self._clock.sleep(2 * self._delay)
        async with aclosing(self._reach().start_generate(body)) as frames:
            async for frame in frames:
                yield frame
