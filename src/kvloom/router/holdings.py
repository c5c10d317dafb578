"""What one request holds at replicas, and how they learn that it does so no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kvloom.router.replica import Replica
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable, UnknownModel

What = Literal["room", "work", "pin"]
T = TypeVar("T")

REFUSALS: Final = (BadRequest, UnknownModel, QueueFull, OutOfBlocks)  # after them nothing is held
RELEASE_SECONDS: Final = 2.0  # for engines to be told that a request is over; leases do it where that fails


class _Held(NamedTuple):
    """name: the request's id there."""

    replica: Replica
    what: What
    name: str


class Holdings:
    """Of one request, which may have several ids at a time: one that moves has another where it goes. tasks:
    where giving back runs on when the request is cancelled. aborted: its caller wants no more of it."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.aborted = False
        self._tasks = tasks
        self._held: list[_Held] = []
        self._asked: dict[asyncio.Future[Any], Replica] = {}  # what reserves, and is not answered yet
        self._to_compute: dict[Replica, int] = {}  # tokens, counted in its queue

    @asynccontextmanager
    async def asking(self, replica: Replica, what: What, name: str) -> AsyncIterator[None]:
        """Something is held at `replica` from here on, unless it refuses. Raises Unavailable where the
        request was aborted."""
        if self.aborted:
            raise Unavailable("the request was aborted")
        self._held.append(_Held(replica, what, name))
        replica.begin_call()
        try:
            async with replica.reached():
                yield
        except REFUSALS:
            self.let_go(replica, what, name)
            raise

    def let_go(self, replica: Replica, what: What, name: str) -> None:
        held = _Held(replica, what, name)
        if held in self._held:
            self._held.remove(held)
            replica.end_call()

    def is_to_compute(self, replica: Replica, tokens: int) -> None:
        """The request's part of the replica's queue is this many from here on."""
        replica.queue += tokens - self._to_compute.pop(replica, 0)
        if tokens:
            self._to_compute[replica] = tokens

    async def answered(self, replica: Replica, verb: Coroutine[Any, Any, T]) -> T:
        """What reserves is never taken back half way: an abort could get there before it, and would leave
        behind what it reserves."""
        asked = asyncio.ensure_future(verb)
        self._asked[asked] = replica
        asked.add_done_callback(self._settled)
        return await asyncio.shield(asked)

    def _settled(self, asked: asyncio.Future[Any]) -> None:
        del self._asked[asked]
        if not asked.cancelled():
            asked.exception()  # a refusal is no news to who has stopped waiting for the answer

    async def abort(self, choice: int | None) -> None:
        """End the request, or one choice of it, wherever something is held."""
        self.aborted = self.aborted or choice is None
        async with asyncio.TaskGroup() as group:  # one that hangs keeps no other from hearing of it
            for replica, name in self._places:
                group.create_task(_end_at(replica, name, choice))

    @property
    def _places(self) -> list[tuple[Replica, str]]:
        return list(dict.fromkeys((held.replica, held.name) for held in self._held))

    async def give_back(self) -> None:
        """All of it, wherever that is. An engine that cannot be reached is no error."""
        for replica in list(self._to_compute):
            self.is_to_compute(replica, 0)
        if self._held:
            await asyncio.shield(self._tasks.create_task(self._give_back()))

    async def _give_back(self) -> None:
        places, held = self._places, self._held
        self._held = []
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_SECONDS), asyncio.TaskGroup() as group:
                    for replica, name in places:
                        group.create_task(self._give_back_at(replica, name))
        finally:
            for replica, _, _ in held:
                replica.end_call()
            for asked in list(self._asked):
                asked.cancel()

    async def _give_back_at(self, replica: Replica, name: str) -> None:
        asked = [verb for verb, where in self._asked.items() if where is replica]
        if asked:
            await asyncio.wait(asked)
        await _end_at(replica, name)


async def _end_at(replica: Replica, name: str, choice: int | None = None) -> None:
    with suppress(KvloomError):
        await replica.client.abort(name, choice)
