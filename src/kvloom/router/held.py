"""Tracks what one session holds at replicas: reservations, pins and running work. It is kept alive, and given
back at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kvloom.router.quarantine import Deaths
from kvloom.router.replicas import Replica
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable, UnknownModel
from kvloom.types.verbs import Prepared, RemoteSend

What = Literal["room", "work", "pin"]
T = TypeVar("T")

REFUSALS: Final = (BadRequest, UnknownModel, QueueFull, OutOfBlocks)  # after them nothing is held
RELEASE_SECONDS: Final = 2.0  # for engines to be told that a request is over; leases do it if that fails
RENEWALS: Final = 3  # in the time of one lease


@dataclass(frozen=True, slots=True)
class PeerReservation:
    """Room at `replica` for K and V of prompt[matched:end]; what lies before is there already."""

    replica: Replica
    model: str
    prompt: list[int]
    given: Prepared
    salt: str = ""

    @property
    def matched(self) -> int:
        return self.given.matched

    @property
    def end(self) -> int:
        return self.given.end

    def order(self, request: str, begin: int, end: int, priority: int, tenant: str) -> RemoteSend | None:
        """Returns the order to fill prompt[begin:end] of the room, for a source that knows the request by
        that id. None says that nothing of it is to be sent."""
        begin, end = max(begin, self.matched), min(end, self.end)
        if begin >= end:
            return None
        given = self.given
        return RemoteSend(
            model=self.model,
            request=request,
            prompt=self.prompt,
            address=given.address,
            peer=given.peer,
            begin=begin,
            end=end,
            priority=priority,
            salt=self.salt,
            tenant=tenant,
        )


class _Holding(NamedTuple):
    replica: Replica
    what: What
    name: str
    """The id that the request has there. A request that migrates has another id at its destination."""


class SessionHeld:
    """The holdings of one session, counted as calls at their replicas."""

    def __init__(self, clock: Clock, tasks: asyncio.TaskGroup, deaths: Deaths) -> None:
        self.aborted = False
        """Whether the caller wants no more of the request."""
        self._clock = clock
        self._deaths = deaths
        self._tasks = tasks  # where giving back goes on if the request is cancelled
        self._holdings: list[_Holding] = []
        self._asked: dict[asyncio.Future[Any], Replica] = {}  # what reserves, and is not answered yet
        self._to_compute: dict[Replica, int] = {}  # tokens, counted in its queue
        self._kept: dict[Replica, asyncio.Task[None]] = {}  # pins, which are renewed

    def begin(self, replica: Replica, what: What, name: str) -> None:
        """Counts something as held at `replica` from here on. Raises Unavailable if the request was
        aborted, and RequestQuarantined if it is tried no more."""
        if self._deaths.verdict is not None:
            raise self._deaths.verdict
        if self.aborted:
            raise Unavailable("the request was aborted")
        self._holdings.append(_Holding(replica, what, name))
        replica.begin_call()

    def let_go(self, replica: Replica, what: What, name: str) -> None:
        """Counts it as held no more. It need not have been held."""
        holding = _Holding(replica, what, name)
        if holding in self._holdings:
            self._holdings.remove(holding)
            replica.end_call()

    @asynccontextmanager
    async def asking(self, replica: Replica, what: What, name: str) -> AsyncIterator[None]:
        """Counts something as held at `replica` from here on, unless the replica refuses."""
        self.begin(replica, what, name)
        try:
            yield
        except REFUSALS:
            self.let_go(replica, what, name)
            raise
        except Unavailable as error:
            raise await self.missed(replica, error) from error

    async def missed(self, replica: Replica, error: Unavailable, *, waits: bool = False) -> KvloomError:
        """Returns the error with the unit's name, after the unit was asked whether it is still there. If it
        is not, that counts as a death of the request, and the error may be RequestQuarantined. waits: whether
        the request has been let in there, and has not begun."""
        return self._deaths.counted(await replica.missed(error), waits=waits)

    def is_to_compute(self, replica: Replica, tokens: int) -> None:
        """Sets the request's part of the replica's queue."""
        replica.queue += tokens - self._to_compute.pop(replica, 0)
        if tokens:
            self._to_compute[replica] = tokens

    async def answered(self, replica: Replica, verb: Coroutine[Any, Any, T]) -> T:
        """Returns the answer of a verb that reserves. Such a verb is never taken back half way: an abort
        could get to the engine before it, and would leave behind what it reserves."""
        asked = asyncio.ensure_future(verb)
        self._asked[asked] = replica
        asked.add_done_callback(self._settled)
        return await asyncio.shield(asked)

    def _settled(self, asked: asyncio.Future[Any]) -> None:
        del self._asked[asked]
        if not asked.cancelled():
            asked.exception()  # a refusal is no news if nobody waits for the answer any more

    # -- leases -----------------------------------------------------------------------------------------

    async def renew(self, replica: Replica, name: str, lease: float) -> None:
        """Renews what is held at `replica` until the task is cancelled. Raises KvloomError if nothing is left
        there."""
        while True:
            await self._clock.sleep(lease / RENEWALS)
            try:
                await replica.unit.client.renew(name)
            except Unavailable as error:  # what renews computes nothing: who dies meanwhile dies of others
                raise await replica.missed(error) from error

    def keep(self, replica: Replica, name: str, lease: float) -> None:
        """Renews a pin until all is given back. A pin that is lost meanwhile spares less, and that is all."""
        if replica not in self._kept:
            self._kept[replica] = self._tasks.create_task(self._keep(replica, name, lease))

    async def _keep(self, replica: Replica, name: str, lease: float) -> None:
        with suppress(KvloomError):
            await self.renew(replica, name, lease)

    def stop_renewing(self) -> None:
        while self._kept:
            self._kept.popitem()[1].cancel()

    # -- the end ----------------------------------------------------------------------------------------

    async def abort(self, choice: int | None) -> None:
        """Ends the request, or one choice of it, wherever something is held."""
        self.aborted = self.aborted or choice is None
        async with asyncio.TaskGroup() as group:  # a replica that hangs keeps no other from hearing of it
            for replica, name in self._places:
                group.create_task(_end_at(replica, name, choice))

    @property
    def _places(self) -> list[tuple[Replica, str]]:
        return list(dict.fromkeys((holding.replica, holding.name) for holding in self._holdings))

    async def give_back(self) -> None:
        """Gives back all that is held. An engine that cannot be reached is no error."""
        for replica in list(self._to_compute):
            self.is_to_compute(replica, 0)
        if self._holdings:
            await asyncio.shield(self._tasks.create_task(self._give_back()))

    async def _give_back(self) -> None:
        places, holdings = self._places, self._holdings
        self._holdings = []
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_SECONDS), asyncio.TaskGroup() as group:
                    for replica, name in places:
                        group.create_task(self._give_back_at(replica, name))
        finally:
            for replica, _, _ in holdings:
                replica.end_call()
            for asked in list(self._asked):
                asked.cancel()

    async def _give_back_at(self, replica: Replica, name: str) -> None:
        # What ran there ends with its connection, and leases end the rest. To wait for an answer takes time.
        if replica.unit.away:
            return
        asked = [verb for verb, where in self._asked.items() if where is replica]
        if asked:
            await asyncio.wait(asked)
        await _end_at(replica, name)


async def _end_at(replica: Replica, name: str, choice: int | None = None) -> None:
    with suppress(KvloomError):
        await replica.unit.client.abort(name, choice)
