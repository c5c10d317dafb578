"""A move between modelled engines, and the moment in it at which something happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvloom.types.errors import Unavailable
from kvloom.types.request import Event, StartGenerate
from kvloom.types.verbs import RemoteSend
from tests.modelled_units import Unit
from tests.router.worlds import World

SOURCE, TARGET = 0, 1
# Where in a move: the unit, its verb, or the sends of its hold, and whether the request was told to hold
# before.
POINTS = {
    "reserving": (TARGET, "prep_recv", False),
    "copying": (SOURCE, "remote_send", False),
    "told to hold": (SOURCE, "hold", False),
    "the last copy": (SOURCE, "last_send", False),
    "handing over": (TARGET, "start_generate", True),
    "ending": (SOURCE, "abort", True),
}
Happening = Callable[["Scene"], Awaitable[None]]


@dataclass
class Scene:
    """A request `r` at the source, which is to move to the target; a third unit can take it too. point,
    after: where in the move something happens, before the verb is done or before its answer comes."""

    point: str
    after: bool
    happening: Happening
    body: StartGenerate
    w: World = field(init=False)
    task: asyncio.Task[None] = field(init=False)
    told: bool = False
    happened: bool = False
    dead: set[int] = field(default_factory=set)
    again: list[Callable[[], Awaitable[None]]] = field(default_factory=list)  # calls that come a second time

    async def pass_by(self, unit: int, verb: str, *, after: bool) -> None:
        """A verb is about to be done, or is done."""
        self.told = self.told or (verb == "hold" and unit == SOURCE and after)
        here = POINTS[self.point] == (unit, verb, self.told) and after == self.after
        if verb == "hold" and after:
            here = self.point == "told to hold" and self.after
        if here and not self.happened and hasattr(self, "task"):
            self.happened = True
            await self.happening(self)

    def refuse_dead(self, unit: int) -> None:
        if unit in self.dead:
            raise Unavailable("the engine cannot be reached")


class Wire:
    """Satisfies `EngineClient`: a unit, as the router reaches it."""

    def __init__(self, scene: Scene, number: int, unit: Unit) -> None:
        self._scene = scene
        self._number = number
        self._engine = unit.engine
        transfers = unit.engine._transfers
        send = transfers.send_what_is_here

        async def last_send(bodies: Sequence[RemoteSend]) -> list[int]:
            scene.refuse_dead(number)
            await scene.pass_by(number, "last_send", after=False)
            sent = await send(bodies)
            await scene.pass_by(number, "last_send", after=True)
            return sent

        transfers.send_what_is_here = last_send  # type: ignore[method-assign]

    def __getattr__(self, verb: str) -> Any:
        async def call(*arguments: Any) -> Any:
            scene = self._scene
            scene.refuse_dead(self._number)

            async def do() -> Any:
                return await getattr(self._engine, verb)(*arguments)

            scene.again.append(do)
            await scene.pass_by(self._number, verb, after=False)
            scene.refuse_dead(self._number)
            answer = await do()
            await scene.pass_by(self._number, verb, after=True)
            scene.refuse_dead(self._number)
            return answer

        return call

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        scene = self._scene
        scene.refuse_dead(self._number)

        async def again() -> None:
            async with aclosing(self._engine.start_generate(body)) as frames:
                await anext(frames)

        scene.again.append(again)
        await scene.pass_by(self._number, "start_generate", after=False)
        async with aclosing(self._engine.start_generate(body)) as frames:
            async for frame in frames:
                scene.refuse_dead(self._number)
                if not frame:
                    await scene.pass_by(self._number, "start_generate", after=True)
                    scene.refuse_dead(self._number)
                yield frame
