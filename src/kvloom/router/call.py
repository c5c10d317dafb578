"""One request under a program: the verbs it may use, and what they hold until the request is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from msgspec.structs import replace

from kvloom.core.address import Endpoint, KVAddress, resolve
from kvloom.core.clock import Clock
from kvloom.core.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable, UnknownModel
from kvloom.core.request import EndEvent, Event, StartGenerate
from kvloom.core.verbs import Pin, PrepRecv, RemoteSend, Sent
from kvloom.router.fleet import Fleet
from kvloom.router.replica import Replica

Frames = AsyncGenerator[list[Event], None]
What = Literal["room", "work", "pin"]
T = TypeVar("T")

_REFUSALS: Final = (BadRequest, UnknownModel, QueueFull, OutOfBlocks)  # after them nothing is held
RELEASE_SECONDS: Final = 2.0  # for engines to be told that a request is over; leases do it where that fails
RENEWALS: Final = 3  # in the time of one lease
_LONGEST_ID: Final = 190  # characters of the request's own, of 200 that an id may have


class Lost(KvloomError):
    """The engine has ended a request with an error before its first event: another may still answer it."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Room at `replica` for prompt[matched:end]; what lies before is there already. lease: seconds."""

    replica: Replica
    matched: int
    end: int
    address: KVAddress
    peer: Endpoint
    lease: float


class Call:
    """Positions count in the prompt, negative ones from its end; None is its end. Verbs raise KvloomError.

    answered: an event has been passed on, so nobody else can answer any more. refused: the replicas that
    would not, or could not, answer from the first token on. name: the request's id at the replicas; after
    `release` it has another, so that a late abort, or a call that arrives twice, harms no further attempt.
    """

    def __init__(self, body: StartGenerate, fleet: Fleet, clock: Clock, tasks: asyncio.TaskGroup) -> None:
        self.body = body
        self.model = body.model
        self.prompt = body.prompt
        self.name = body.request
        self.answered = False
        self.aborted = False
        self.refused: set[Replica] = set()
        self._fleet = fleet
        self._clock = clock
        self._tasks = tasks
        self._held: list[tuple[Replica, What]] = []
        self._streams: list[Frames] = []
        self._asked: dict[asyncio.Future[Any], Replica] = {}  # what reserves, and is not answered yet
        self._pinned: dict[Replica, asyncio.Task[None]] = {}  # and who keeps the lease alive
        self._attempts = 1
        self._computed = 0  # tokens whose K and V were made elsewhere for this request

    # -- the verbs --------------------------------------------------------------------------------------

    async def prep_recv(
        self, replica: Replica, end: int | None = None, *, sender: Replica | None = None
    ) -> Spot:
        """Room at `replica` for prompt[:end], kept until the request is over or generates there. `sender`:
        who will send; refused here where it keeps K and V in another form."""
        body = PrepRecv(
            model=self.model,
            request=self.name,
            prompt=self.prompt,
            end=end,
            sender=sender.form if sender else None,
        )
        async with self._asking(replica, "room"):
            made = await self._answered(replica, replica.client.prep_recv(body))
        return Spot(replica, made.matched, made.end, made.address, made.peer, made.lease)

    async def remote_send(
        self, source: Replica, spot: Spot, *, begin: int = 0, end: int | None = None
    ) -> Sent:
        """`source` writes prompt[begin:end] into the spot, as far as it belongs there. The lease is kept
        alive meanwhile. Where there is nothing to send, nobody is asked."""
        begin = max(resolve(begin, len(self.prompt), "begin"), spot.matched)
        end = min(resolve(end, len(self.prompt), "end"), spot.end)
        if begin >= end:
            return Sent(cached=0, computed=0)
        body = RemoteSend(
            model=self.model,
            request=self.name,
            prompt=self.prompt,
            address=spot.address,
            peer=spot.peer,
            begin=begin,
            end=end,
            priority=self.body.priority,
        )
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(spot.replica, spot.lease))
                async with self._asking(source, "work"):
                    with source.computing(end - begin):
                        sent = await source.client.remote_send(body)
                renewing.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._let_go(source, "work")
        self._fleet.note(self.prompt[:end], source)
        self._computed += sent.computed
        return sent

    def start_generate(self, replica: Replica, *, begin: int = 0) -> Frames:
        """Generate at `replica`, where prompt[:begin] has been received. It is closed with the request."""
        frames = self._generate(replica, begin)
        self._streams.append(frames)
        return frames

    async def _generate(self, replica: Replica, begin: int) -> Frames:
        body = replace(self.body, request=self.name, begin=begin)
        spent = self._computed if begin else 0
        left = len(self.prompt) - resolve(begin, len(self.prompt), "begin")
        self._fleet.note(self.prompt, replica)
        try:
            async with self._asking(replica, "work"), aclosing(replica.client.start_generate(body)) as frames:
                with replica.computing(left):
                    async for frame in frames:
                        self._let_go(replica, "room")  # the engine has taken it over
                        if not self.answered:
                            _raise_lost(replica, frame)
                        self.answered = self.answered or bool(frame)
                        yield _less_cached(frame, spent)
                        if frame:
                            break
                async for frame in frames:
                    yield _less_cached(frame, spent)
        except GeneratorExit:  # closing the engine's stream has ended the request there
            self._let_go(replica, "work")
            raise
        except KvloomError:
            if not begin:
                self.refused.add(replica)
            raise
        self._let_go(replica, "work")

    async def pin(self, replica: Replica, end: int | None = None) -> int:
        """Keep what `replica` has cached of prompt[:end], until the request is over. Returns how many tokens
        that are: none where nothing is cached, or where the replica has promised too much. A second pin at a
        replica takes the first one's place."""
        prompt = self.prompt[: resolve(end, len(self.prompt), "end")]
        body = Pin(model=self.model, request=self.name, prompt=prompt)
        try:
            async with self._asking(replica, "pin"):
                made = await self._answered(replica, replica.client.pin(body))
        except (OutOfBlocks, QueueFull):
            return 0
        if not made.tokens:
            self._let_go(replica, "pin")
        elif replica not in self._pinned:
            self._pinned[replica] = self._tasks.create_task(self._keep(replica, made.lease))
        return made.tokens

    async def _keep(self, replica: Replica, lease: float) -> None:
        """A pin that is lost spares less, and that is all."""
        with suppress(KvloomError):
            await self._renew(replica, lease)

    async def _renew(self, replica: Replica, lease: float) -> None:
        while True:
            await self._clock.sleep(lease / RENEWALS)
            async with replica.reached():
                await replica.client.renew(self.name)

    # -- what it holds ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asking(self, replica: Replica, what: What) -> AsyncIterator[None]:
        """Something is held at `replica` from here on, unless it refuses."""
        if self.aborted:
            raise Unavailable("the request was aborted")
        self._held.append((replica, what))
        replica.begin_call()
        try:
            async with replica.reached():
                yield
        except _REFUSALS:
            self._let_go(replica, what)
            raise

    def _let_go(self, replica: Replica, what: What) -> None:
        if (replica, what) in self._held:
            self._held.remove((replica, what))
            replica.end_call()

    async def _answered(self, replica: Replica, verb: Coroutine[Any, Any, T]) -> T:
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

    async def release(self) -> None:
        """Give back what is held, wherever that is. An engine that cannot be reached is no error."""
        while self._pinned:
            _, renewing = self._pinned.popitem()
            renewing.cancel()
        try:
            while self._streams:
                with suppress(KvloomError):
                    await self._streams.pop().aclose()
        finally:
            if self._held:
                await asyncio.shield(self._tasks.create_task(self._give_back()))
            self._attempts += 1
            self.name = f"{self.body.request[:_LONGEST_ID]}~{self._attempts}"

    async def _give_back(self) -> None:
        held, self._held = self._held, []
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_SECONDS), asyncio.TaskGroup() as group:
                    for replica in dict.fromkeys(replica for replica, _ in held):
                        group.create_task(self._give_back_at(replica))
        finally:
            for replica, _ in held:
                replica.end_call()
            for asked in list(self._asked):
                asked.cancel()

    async def _give_back_at(self, replica: Replica) -> None:
        asked = [verb for verb, where in self._asked.items() if where is replica]
        if asked:
            await asyncio.wait(asked)
        await self._end_at(replica)

    async def _end_at(self, replica: Replica, choice: int | None = None) -> None:
        with suppress(KvloomError):
            await replica.client.abort(self.name, choice)

    async def abort(self, choice: int | None) -> None:
        """End the request, or one choice of it, where it runs."""
        self.aborted = self.aborted or choice is None
        for replica in dict.fromkeys(replica for replica, _ in self._held):
            await self._end_at(replica, choice)


def _raise_lost(replica: Replica, frame: list[Event]) -> None:
    for event in frame:
        if isinstance(event, EndEvent) and event.reason == "error":
            said = event.message or "the engine could not go on with this request"
            raise Lost(f"{replica.name}: {said}")


def _less_cached(frame: list[Event], computed: int) -> list[Event]:
    """What was received had been computed for this very request: the cache has not spared it."""
    if not computed:
        return frame
    return [
        replace(event, cached_tokens=max(0, event.cached_tokens - computed))
        if isinstance(event, EndEvent)
        else event
        for event in frame
    ]
