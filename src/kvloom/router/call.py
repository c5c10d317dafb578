"""One request under a program: the verbs it may use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvloom.core.address import resolve
from kvloom.core.clock import Clock
from kvloom.core.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable
from kvloom.core.request import Event, Made, StartGenerate
from kvloom.core.verbs import Pin, PrepRecv, RemoteSend, Sent
from kvloom.router.fleet import Fleet
from kvloom.router.holdings import Holdings, What
from kvloom.router.progress import Progress, less_cached
from kvloom.router.renewals import Renewals
from kvloom.router.replica import Replica
from kvloom.router.spot import Spot

Frames = AsyncGenerator[list[Event], None]

_LONGEST_ID: Final = 190  # characters of the request's own, of 200 that an id may have


class Lost(KvloomError):
    """The engine has ended all that was left of a request with an error: another may go on."""


class _Moved(NamedTuple):
    """Where a request goes on, and as what. It is let in there."""

    frames: Frames
    replica: Replica
    name: str


class Call:
    """Positions count in the prompt, negative ones from its end; None is its end. Verbs raise KvloomError.

    progress: what the caller has seen, so that another replica can go on after it. let_in: a replica has
    taken it, and promised a context of `needs` tokens. refused: the replicas that would not, or could not,
    generate. running: who generates. name: the request's id at the replicas; after `release`, and where it
    moves to, it has another, so that a late abort, or a call that arrives twice, harms no further attempt.
    tasks: for what is to be done to its end whoever waits for it.
    """

    def __init__(self, body: StartGenerate, fleet: Fleet, clock: Clock, tasks: asyncio.TaskGroup) -> None:
        self.body = body
        self.model = body.model
        self.prompt = body.prompt
        self.name = body.request
        self.progress = Progress(body.n)
        self.needs = 0
        self.aborted = False
        self.refused: set[Replica] = set()
        self.running: Replica | None = None
        self.moving = False
        self._running_as = ""
        self._moved: _Moved | None = None  # where it goes on once `running` has told all it has
        self.tasks = tasks
        self._fleet = fleet
        self._holdings = Holdings(tasks)
        self._renewals = Renewals(clock, tasks)
        self._streams: list[Frames] = []
        self._attempts = 1
        self._computed = 0  # tokens whose K and V were made elsewhere for this request

    @property
    def let_in(self) -> bool:
        return self.needs > 0

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
            self._is_to_compute(who, *part)
        try:
            async with self._asking(replica, "room", self.name):
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
                self._is_to_compute(source, 0, end)  # what goes before is not sent, but attended to
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
                async with self._asking(source, "work", name):
                    sent = await source.client.remote_send(body)
                renewing.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._holdings.let_go(source, "work", name)
        self._fleet.note(self.prompt[:end], source)
        self._computed += sent.computed
        return sent

    def start_generate(self, replica: Replica, *, begin: int = 0) -> Frames:
        """Generate at `replica`, where prompt[:begin] has been received. It is closed with the request."""
        frames = self._go_on(replica, begin)
        self._streams.append(frames)
        return frames

    async def _go_on(self, replica: Replica, begin: int) -> Frames:
        """At `replica`, and wherever the request moves from there."""
        here: Frames | None = self._generate(replica, begin)
        try:
            while here is not None:
                async with aclosing(here):
                    async for frame in here:
                        yield frame
                here = None
                if self._moved is not None and not self.progress.over:
                    here, self.running, self._running_as = self._moved
                    self._moved = None
        finally:
            left, self._moved = self._moved, None
            if left is not None:
                await left.frames.aclose()

    async def _generate(
        self, replica: Replica, begin: int, made: list[Made] | None = None, name: str | None = None
    ) -> Frames:
        """Choices that were aborted while nobody generated end first. made, name: what the choices have,
        where the caller has not seen all of it yet, and the request's id there."""
        if made is None and self.progress.unwanted:
            yield self.progress.end_unwanted()
            if self.progress.over:
                return
        name = name or self.name
        body = self._rest(name, begin, self.progress.made if made is None else made)
        begin, spent = body.begin, self._computed if body.begin else 0
        self._is_to_compute(replica, resolve(begin, len(self.prompt), "begin"), len(self.prompt))
        self._fleet.note(self.prompt, replica)
        replica.report.sent(self.model, len(self.prompt), len(body.choices))
        try:
            async with (
                self._asking(replica, "work", name),
                aclosing(replica.client.start_generate(body)) as frames,
            ):
                async for frame in frames:
                    self._holdings.let_go(replica, "room", name)  # the engine has taken it over
                    if not self.let_in:
                        most = len(self.prompt) + self.body.sampling.max_tokens
                        self.needs = min(most, replica.card.context_length)
                    if frame:
                        self.running, self._running_as = replica, name
                        self._holdings.is_to_compute(replica, 0)
                    told = self.progress.as_one(less_cached(frame, spent), moved=self._moved is not None)
                    news = told if made is None else self.progress.unseen(told)
                    seen, failure = self.progress.survives(news)
                    self.progress.note(seen)
                    yield seen
                    if failure is not None:
                        await replica.check()  # it may be about to end
                        raise Lost(f"{replica.name}: {failure}")
        except GeneratorExit:  # closing the engine's stream has ended the request there
            self._holdings.let_go(replica, "work", name)
            raise
        except KvloomError:
            if not begin or self.progress.begun:
                self.refused.add(replica)
            raise
        finally:
            if self.runs(replica, name):
                self.running = None
            self._holdings.is_to_compute(replica, 0)
        self._holdings.let_go(replica, "work", name)

    def runs(self, replica: Replica, name: str) -> bool:
        """Whether `replica` generates it, under this id."""
        return self.running is replica and self._running_as == name

    async def hand_over(self, source: Replica, target: Replica, made: list[Made], name: str) -> None:
        """Go on at `target` as `name` after `made`, once `source` has told the last of it. Raises
        KvloomError, and all is as it was, where the target does not let it in or the request has gone on
        otherwise."""
        before, refused = self.name, target in self.refused
        moved = self._generate(target, 0, made, name)
        try:
            if await anext(moved, None) is None:
                raise Unavailable(f"{target.name} ended request {before} before it began")
            choices = {one.choice for one in made}
            as_it_was = self.runs(source, before) and choices <= self.progress.open
            if not as_it_was or self.aborted or self.progress.unwanted:
                raise BadRequest(f"request {before} has gone on otherwise", param="request")
        except BaseException:
            await moved.aclose()
            self._holdings.let_go(target, "work", name)  # also where it was cancelled before it was let in
            if not refused:
                self.refused.discard(target)  # full for a move is not full for good
            raise
        self._moved, self.name = _Moved(moved, target, name), name

    def _rest(self, name: str, begin: int, made: list[Made]) -> StartGenerate:
        """What is still to be generated, after `made`."""
        sampling = self.body.sampling
        if self.progress.prompt_told:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self.body, request=name, begin=begin, made=made, sampling=sampling)

    async def pin(self, replica: Replica, end: int | None = None) -> int:
        """Keep what `replica` has cached of prompt[:end], until the request is over. Returns how many tokens
        that are: none where nothing is cached, or where the replica has promised too much. A second pin at a
        replica takes the first one's place."""
        prompt = self.prompt[: resolve(end, len(self.prompt), "end")]
        name = self.name
        body = Pin(model=self.model, request=name, prompt=prompt)
        try:
            async with self._asking(replica, "pin", name):
                made = await self._holdings.answered(replica, replica.client.pin(body))
        except (OutOfBlocks, QueueFull):
            return 0
        if not made.tokens:
            self._holdings.let_go(replica, "pin", name)
        else:
            self._renewals.keep(replica, name, made.lease)
        return made.tokens

    # -- what it holds ----------------------------------------------------------------------------------

    def _asking(self, replica: Replica, what: What, name: str) -> AbstractAsyncContextManager[None]:
        if self.aborted:
            raise Unavailable("the request was aborted")
        return self._holdings.asking(replica, what, name)

    def _is_to_compute(self, replica: Replica, begin: int, end: int) -> None:
        """prompt[begin:end], less what the replica probably has cached."""
        cached = self._fleet.matched(self.prompt).get(replica, 0)
        self._holdings.is_to_compute(replica, max(0, end - max(begin, cached)))

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
        self.aborted = self.aborted or choice is None
        self.progress.cancel(choice)
        await self._holdings.abort(choice)
