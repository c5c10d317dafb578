"""One request under a program: the verbs it may use."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from kvloom.router.course import Course, Frames
from kvloom.router.fleet import Fleet
from kvloom.router.holdings import Holdings
from kvloom.router.progress import Progress
from kvloom.router.renewals import Renewals
from kvloom.router.replica import Replica
from kvloom.router.spot import Spot
from kvloom.types.address import resolve
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError, OutOfBlocks, QueueFull
from kvloom.types.request import Made, StartGenerate
from kvloom.types.verbs import Pin, PrepRecv, RemoteSend, Sent

__all__ = ["Call", "Frames"]  # what programs are written with

_LONGEST_ID: Final = 190  # characters of the request's own, of 200 that an id may have


class Call:
    """Positions count in the prompt, negative ones from its end; None is its end. Verbs raise KvloomError.

    progress: what the caller has seen, so that another replica can go on after it. course: who generates.
    let_in: a replica has taken it. name: the request's id at the replicas; after `release`, and where it
    moves to, it has another, so that a late abort, or a call that arrives twice, harms no further attempt.
    tasks: for what is to be done to its end whoever waits for it.
    """

    def __init__(self, body: StartGenerate, fleet: Fleet, clock: Clock, tasks: asyncio.TaskGroup) -> None:
        self.body = body
        self.model = body.model
        self.prompt = body.prompt
        self.name = body.request
        self.progress = Progress(body.n, clock)
        self.moving = False
        self.tasks = tasks
        self._fleet = fleet
        self._holdings = Holdings(tasks)
        self.course = Course(body, fleet, self._holdings, self.progress)
        self._renewals = Renewals(clock, tasks)
        self._streams: list[Frames] = []
        self._attempts = 1

    @property
    def let_in(self) -> bool:
        return self.course.needs > 0

    @property
    def aborted(self) -> bool:
        """All of it, by its caller."""
        return self._holdings.aborted

    # -- the verbs --------------------------------------------------------------------------------------

    async def prep_recv(
        self, replica: Replica, end: int | None = None, *, sender: Replica | None = None
    ) -> Spot:
        """Room at `replica` for prompt[:end], kept until the request is over or generates there. `sender`:
        who will send; refused here where it keeps K and V in another form. From here on both count as having
        their parts of the prompt to compute."""
        body = PrepRecv(
            model=self.model,
            request=self.name,
            prompt=self.prompt,
            end=end,
            sender=sender.form if sender else None,
        )
        until = resolve(end, len(self.prompt), "end")
        parts = {replica: (until, len(self.prompt))} | ({sender: (0, until)} if sender else {})
        for who, part in parts.items():
            self.course.is_to_compute(who, *part)
        try:
            async with self._holdings.asking(replica, "room", self.name):
                made = await self._holdings.answered(replica, replica.client.prep_recv(body))
        except KvloomError:
            for who in parts:
                self._holdings.is_to_compute(who, 0)
            raise
        return Spot(replica, made.matched, made.end, made.address, made.peer, made.lease)

    async def remote_send(
        self, source: Replica, spot: Spot, *, begin: int = 0, end: int | None = None
    ) -> Sent:
        """`source` writes prompt[begin:end] into the spot, as far as it belongs there. The lease is kept
        alive meanwhile. Where there is nothing to send, nobody is asked."""
        begin = max(resolve(begin, len(self.prompt), "begin"), spot.matched)
        end = min(resolve(end, len(self.prompt), "end"), spot.end)
        sent = Sent(cached=0, computed=0)
        try:
            if begin < end:
                self.course.is_to_compute(source, 0, end)  # what goes before is not sent, but attended to
                sent = await self._sent(source, spot, begin, end)
        finally:
            self._holdings.is_to_compute(source, 0)
        return sent

    async def _sent(self, source: Replica, spot: Spot, begin: int, end: int) -> Sent:
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
        name = self.name
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renewals.renew(spot.replica, name, spot.lease))
                async with self._holdings.asking(source, "work", name):
                    sent = await source.client.remote_send(body)
                renewing.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._holdings.let_go(source, "work", name)
        self._fleet.note(self.prompt[:end], source)
        self.course.computed += sent.computed
        return sent

    def start_generate(self, replica: Replica, *, begin: int = 0) -> Frames:
        """Generate at `replica`, where prompt[:begin] has been received. It is closed with the request."""
        frames = self.course.begin(replica, self.name, begin)
        self._streams.append(frames)
        return frames

    async def hand_over(
        self, source: Replica, before: str, target: Replica, made: list[Made], name: str
    ) -> None:
        """See `Course.hand_over`."""
        await self.course.hand_over(source, before, target, made, name)
        self.name = name

    async def pin(self, replica: Replica, end: int | None = None) -> int:
        """Keep what `replica` has cached of prompt[:end], until the request is over. Returns how many tokens
        that are: none where nothing is cached, or where the replica has promised too much. A second pin at a
        replica takes the first one's place."""
        prompt = self.prompt[: resolve(end, len(self.prompt), "end")]
        name = self.name
        body = Pin(model=self.model, request=name, prompt=prompt)
        try:
            async with self._holdings.asking(replica, "pin", name):
                made = await self._holdings.answered(replica, replica.client.pin(body))
        except (OutOfBlocks, QueueFull):
            return 0
        if not made.tokens:
            self._holdings.let_go(replica, "pin", name)
        else:
            self._renewals.keep(replica, name, made.lease)
        return made.tokens

    # -- what it holds ----------------------------------------------------------------------------------

    async def release(self) -> None:
        """Give back what is held, wherever that is. An engine that cannot be reached is no error."""
        self._renewals.stop()
        try:
            while self._streams:
                with suppress(KvloomError):
                    await self._streams.pop().aclose()
        finally:
            await self._holdings.give_back()
            self.name = self.another_name()

    def another_name(self) -> str:
        """An id that nothing of the request has had."""
        self._attempts += 1
        return f"{self.body.request[:_LONGEST_ID]}~{self._attempts}"

    async def abort(self, choice: int | None) -> None:
        """End the request, or one choice of it, where it runs."""
        self.progress.cancel(choice)
        await self._holdings.abort(choice)
