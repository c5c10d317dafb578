"""A session: one request's stream over one or more engines, and the verbs by which a program makes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from enum import Enum
from typing import Final, Protocol

from msgspec.structs import replace

from kvloom.cluster.prefixes import lasting_pin
from kvloom.journal.lives import Teller, untold
from kvloom.router.candidates import Candidates, Lost, WaitingRoom
from kvloom.router.held import REFUSALS, RELEASE_SECONDS, PeerReservation, SessionHeld
from kvloom.router.progress import Milestones, RequestProgress
from kvloom.router.quarantine import Deaths, Quarantine
from kvloom.router.replicas import Fleet, Replica, arriving
from kvloom.types.address import resolve
from kvloom.types.client import Frames
from kvloom.types.clock import Clock, together
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable
from kvloom.types.request import Event, Made, StartGenerate
from kvloom.types.verbs import Pin, Prefix, PrepRecv, Sent

_LONGEST_ID: Final = 190  # characters of the request's own, of 200 that an id may have


class Strategy(Protocol):
    """Decides what the router does with a request: a program with its options."""

    @property
    def name(self) -> str: ...

    def __call__(self, call: Session, fleet: Fleet) -> Frames: ...


class Session:
    """One request at the router, from its arrival to its end. Programs are handed it as their `call`.

    Positions count in the prompt, negative ones from its end; None is its end. Verbs raise KvloomError.
    """

    def __init__(
        self,
        body: StartGenerate,
        serving: Callable[[], Fleet],
        room: WaitingRoom,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        quarantine: Quarantine,
        tell: Teller = untold,
    ) -> None:
        """serving: gives the model's replicas as they are now, and raises UnknownModel if there are none;
        tasks: runs what is to be done to its end even if nobody waits for it any more; tell: `Teller`."""
        self.body, self.model, self.prompt = body, body.model, body.prompt
        self.name = body.request
        """The request's id at the replicas. After `release`, and with a migration, it has another, so that a
        late abort, or a call that arrives twice, harms no further attempt."""
        self.progress = RequestProgress(body.n, clock)
        self.milestones = Milestones(body.request, self.progress, tell)
        self.tasks = tasks
        self.migrating = False
        self.running: Leg | None = None
        """The leg whose engine has let the request in and generates it."""
        self.deaths = Deaths(body, self.progress, quarantine)
        self.held = SessionHeld(clock, tasks, self.deaths)
        self.following: Leg | None = None
        """The leg that goes on once `running` has told all it has, if the request has been handed over."""
        self.computed = 0
        """Tokens whose K and V were made elsewhere for this request."""
        self._serving, self._room, self._quarantine = serving, room, quarantine
        self._legs, self._attempts = list[Leg](), 1

    async def frames(
        self, program: Strategy, sessions: dict[str, Session]
    ) -> AsyncGenerator[list[Event], None]:
        """Yields the request's whole stream, as `program` makes it. If that fails, wherever the request
        stands, the replicas that are up are asked to generate the rest of it, the least loaded first. If none
        is up, but one will be, the request waits for that: what it was refused there does not count. The
        session is one of `sessions` meanwhile, under the caller's id for it. Raises RequestQuarantined if too
        many engines have died of it, or did lately."""
        request = self.body.request
        if request in sessions:
            raise BadRequest(f"request id {request} is in use", param="request")
        self._quarantine.check(self.body)
        candidates = Candidates(self.body, self.progress, self.held, self._serving, self._room)
        self.candidates, self.fleet = candidates, candidates.fleet
        # K and V that are received come without logits: who wants those of a prompt goes to one replica.
        plain = self.body.sampling.prompt_logprobs is not None or self.body.task != "generate"
        sessions[request] = self
        try:
            while True:
                await candidates.until_somebody_is_up()
                if self.progress.unwanted:
                    yield self.progress.end_unwanted()
                    if self.progress.over:
                        break
                    continue
                fleet = candidates.fleet
                try:
                    stream = self.start_generate(fleet.least_loaded()) if plain else program(self, fleet)
                    async with aclosing(stream):
                        async for frame in stream:
                            yield frame
                    break
                except KvloomError as error:
                    candidates.go_on_after(error)
                    plain, self.milestones.failed_of = True, error.code
                await self.release()
            if not self.progress.over:
                raise KvloomError(f"the program {program.name} ended without an answer")
        finally:
            try:
                await self.release()
            finally:
                del sessions[request]

    # -- the verbs --------------------------------------------------------------------------------------

    async def prep_recv(
        self, replica: Replica, end: int | None = None, *, sender: Replica | None = None
    ) -> PeerReservation:
        """Reserves room at `replica` for prompt[:end], kept until the request is over or generates there.
        sender: the replica that will send; it is refused here if it keeps K and V in another form. From here
        on both count as having their parts of the prompt to compute."""
        body = PrepRecv(
            model=self.model,
            request=self.name,
            prompt=self.prompt,
            end=end,
            sender=sender.card.form if sender else None,
            salt=self.body.salt,
        )
        until = resolve(end, len(self.prompt), "end")
        parts = {replica: (until, len(self.prompt))} | ({sender: (0, until)} if sender else {})
        for who, part in parts.items():
            self.is_to_compute(who, *part)
        try:
            async with self.held.asking(replica, "room", self.name):
                given = await self.held.answered(replica, replica.unit.client.prep_recv(body))
        except KvloomError:
            for who in parts:
                self.held.is_to_compute(who, 0)
            raise
        return PeerReservation(replica, self.model, self.prompt, given, self.body.salt)

    async def remote_send(
        self, source: Replica, spot: PeerReservation, *, begin: int = 0, end: int | None = None
    ) -> Sent:
        """Lets `source` write prompt[begin:end] into the reserved room, as far as it belongs there. The lease
        is kept alive meanwhile. If there is nothing to send, nobody is asked."""
        first, last = resolve(begin, len(self.prompt), "begin"), resolve(end, len(self.prompt), "end")
        order = spot.order(self.name, first, last, self.body.priority, self.body.tenant)
        try:
            if order is None or order.end is None:
                return Sent(cached=0, computed=0)
            self.is_to_compute(source, 0, order.end)  # what goes before is not sent, but attended to
            async with together() as group:
                renewing = group.create_task(self.held.renew(spot.replica, order.request, spot.given.lease))
                async with self.held.asking(source, "work", order.request):
                    sent = await source.unit.client.remote_send(order)
                renewing.cancel()
        finally:
            self.held.is_to_compute(source, 0)
        self.held.let_go(source, "work", order.request)
        self.fleet.note(self.prompt, source, order.end)
        self.computed += sent.computed
        return sent

    async def pin(self, replica: Replica, end: int | None = None) -> int:
        """Keeps what `replica` has cached of prompt[:end], until the request is over. Returns how many tokens
        that are: none if nothing is cached, or if the replica has promised too much. A second pin at a
        replica takes the first one's place."""
        name = self.name
        prompt = self.prompt[: resolve(end, len(self.prompt), "end")]
        salt, tenant = self.body.salt, self.body.tenant
        body = Pin(model=self.model, request=name, prompt=prompt, salt=salt, tenant=tenant)
        try:
            async with self.held.asking(replica, "pin", name):
                made = await self.held.answered(replica, replica.unit.client.pin(body))
        except (OutOfBlocks, QueueFull):
            return 0
        if not made.tokens:
            self.held.let_go(replica, "pin", name)
        else:
            self.held.keep(replica, name, made.lease)
        return made.tokens

    async def keep(self, replica: Replica, end: int | None = None, *, seconds: int = 300) -> int:
        """Keeps what `replica` has cached of prompt[:end] for `seconds` from now, though the request may be
        over by then; whoever of the tenant asks for the same tokens again begins the time anew. Returns how
        many tokens are kept: none if nothing is cached, if too much is promised or the tenant keeps too much,
        or if the replica does not answer."""
        body = lasting_pin(self.body, resolve(end, len(self.prompt), "end"), seconds)
        try:
            return (await asyncio.wait_for(replica.unit.client.pin(body), RELEASE_SECONDS)).tokens
        except (OutOfBlocks, QueueFull, Unavailable, TimeoutError):
            return 0

    async def evict(self, replica: Replica, end: int | None = None) -> int:
        """Lets `replica` drop what it has cached of prompt[:end] and past it, unless it is used, pinned or
        leads to other prompts. Returns how many tokens that were: none if it does not answer."""
        last = resolve(end, len(self.prompt), "end")
        if not last:  # without tokens an engine would drop all that it has
            return 0
        body = Prefix(model=self.model, prompt=self.prompt[:last], salt=self.body.salt)
        self.fleet.dropped(self.prompt, replica, last)
        try:
            return (await asyncio.wait_for(replica.unit.client.evict(body), RELEASE_SECONDS)).tokens
        except (Unavailable, TimeoutError):
            return 0

    def start_generate(self, replica: Replica, *, begin: int = 0) -> Frames:
        """Generates at `replica`, where prompt[:begin] has been received, and goes on wherever the request
        migrates from there. The stream is closed with the request."""
        leg = Leg(self, replica, self.name, begin)
        self._legs.append(leg)
        return leg

    async def abort(self, choice: int | None) -> None:
        """Ends the request, or one choice of it, where it runs."""
        self.progress.cancel(choice)
        await self.held.abort(choice)

    # -- what engines are told, and what they have ------------------------------------------------------

    def is_to_compute(self, replica: Replica, begin: int, end: int) -> None:
        """Counts prompt[begin:end], less what the replica probably has cached, in the replica's queue."""
        self.held.is_to_compute(replica, self.fleet.to_compute(self.prompt, replica, begin, end))

    def rest(self, name: str, begin: int, made: list[Made]) -> StartGenerate:
        """Returns what is still to be generated after `made`, for an engine that knows it as `name`."""
        sampling = self.body.sampling
        if self.progress.prompt_told:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self.body, request=name, begin=begin, made=made, sampling=sampling)

    def another_name(self) -> str:
        """Returns an id that nothing of the request has had."""
        self._attempts += 1
        return f"{self.body.request[:_LONGEST_ID]}~{self._attempts}"

    async def release(self) -> None:
        """Gives back what is held, wherever that is. An engine that cannot be reached is no error."""
        self.held.stop_renewing()
        try:
            while self._legs:
                with suppress(KvloomError):
                    await self._legs.pop().aclose()
        finally:
            await self.held.give_back()
            self.name = self.another_name()

    async def hand_over(self, source: Leg, target: Replica, made: list[Made], name: str) -> None:
        """Lets the request go on at `target` as `name` after `made`, which is empty if it has not begun, once
        `source` has told the last of it. Raises KvloomError, and all is as it was, if the target does not let
        it in or the request has gone on otherwise."""
        if not target.up:  # A reservation is no call, so a drain of the target may have ended meanwhile.
            raise Unavailable(f"{target.name} takes no requests any more")
        refused = target in self.candidates.refused
        leg = Leg(self, target, name, made=made)
        try:
            if await anext(leg, None) is None:
                raise Unavailable(f"{target.name} ended request {source.name} before it began")
            choices = {one.choice for one in made}
            as_made = choices <= self.progress.open if made else not self.progress.begun
            if self.running is not source or not as_made or self.progress.unwanted:
                raise BadRequest(f"request {source.name} has gone on otherwise", param="request")
        except BaseException:
            await leg.aclose()
            self.held.let_go(target, "work", name)  # also if it was cancelled before it was let in
            if not refused:
                self.candidates.refused.discard(target)  # full for a migration is not full for good
            raise
        self.following, self.name = leg, name

    async def next_leg(self) -> Leg | None:
        """Returns the leg that goes on after the running one has ended, if the request was handed over."""
        if self.progress.over:
            await self.drop_following()
        self.running, self.following = self.following, None
        return self.running

    async def drop_following(self) -> None:
        """Ends the request at the replica that it was handed over to, if it has not begun there for its
        caller."""
        following, self.following = self.following, None
        if following is not None:
            await following.aclose()


class LegState(Enum):
    """The states of a leg."""

    UNASKED = "unasked"
    """The engine has not been asked for anything yet."""
    STREAMING = "streaming"
    """The engine was asked, and its stream has not ended."""
    CONTINUED = "continued"
    """The request goes on with the next leg."""
    OVER = "over"
    """Nothing comes any more."""


class Leg:
    """The part of a session's stream that one engine, `replica`, generates, which knows the request as
    `name`. After a migration the frames of the next leg follow from the same iterator."""

    _frames: Frames
    """The engine's stream, once it was asked."""
    _next: Leg
    """The leg with which the request goes on."""

    def __init__(
        self,
        session: Session,
        replica: Replica,
        name: str,
        begin: int = 0,
        *,
        made: list[Made] | None = None,
    ) -> None:
        """made: the tokens of each choice with which the leg begins, if the request was handed over; the
        caller may not have seen all of them yet. None: those that the caller has seen when the leg begins."""
        self.replica = replica
        self.name = name
        self._session = session
        self._begin_at = begin
        self._made = made
        self._computed = session.computed if begin else 0
        self._state = LegState.UNASKED
        self._new = True  # until its first event has come
        self._let_in = False
        self._waits = False  # from when it is let in until its prompt begins to be computed
        self._failure: str | None = None  # why nothing comes any more, though the request is not over

    def __aiter__(self) -> Leg:
        return self

    async def __anext__(self) -> list[Event]:
        if self._state is LegState.UNASKED:
            progress = self._session.progress
            if self._made is None and progress.unwanted:  # aborted while nobody generated
                ends = progress.end_unwanted()
                self._state = LegState.OVER if progress.over else LegState.UNASKED
                return ends
            self._ask()
        if self._state is LegState.STREAMING:
            frame = await self._next_frame()
            if frame is not None:
                return frame
        if self._state is LegState.CONTINUED:
            return await anext(self._next)
        raise StopAsyncIteration

    async def _next_frame(self) -> list[Event] | None:
        """Returns what the caller is told of the engine's next frame; None if there is no further one."""
        session = self._session
        try:
            if self._failure is not None:
                await self.replica.unit.check()  # it may be about to end
                raise Lost(f"{self.replica.name}: {self._failure}")
            frame = await anext(self._frames)
            if self._new:
                self._has_come(frame)
            seen, self._failure = session.progress.take(
                frame,
                behind=self._made is not None,
                moved=session.following is not None,
                computed=self._computed,
            )
            return seen
        except StopAsyncIteration:
            if self._end(let_go=True) and (following := await session.next_leg()):
                self._next, self._state = following, LegState.CONTINUED
            return None
        except BaseException as error:
            await self._fail(error)
            raise

    def _ask(self) -> None:
        """Asks the engine for its stream, of which nothing comes before the first frame is awaited."""
        session, replica = self._session, self.replica
        made = session.progress.made if self._made is None else self._made
        body = session.rest(self.name, self._begin_at, made)
        begin = resolve(body.begin, len(body.prompt), "begin")
        session.held.begin(replica, "work", self.name)
        session.is_to_compute(replica, begin, len(body.prompt))
        session.fleet.note(body.prompt, replica)
        replica.unit.report.sent(arriving(body))
        self._frames, self._state = replica.unit.client.start_generate(body), LegState.STREAMING

    def _has_come(self, frame: list[Event]) -> None:
        """Notes the first frame, which says that the engine has let the request in, the second, which says
        that it begins with the prompt, and the first event, which says that it has computed it."""
        session, follows = self._session, self._made is not None
        session.milestones.came(self.replica.name, frame, new=not self._let_in, follows=follows)
        self._waits = not self._let_in
        if not self._let_in:
            self._let_in = True
            if not follows:
                session.running = self
            session.held.let_go(self.replica, "room", self.name)  # the engine has taken it over
            session.candidates.let_in(self.replica)
        if frame:
            self._new = False
            session.held.is_to_compute(self.replica, 0)

    async def _fail(self, error: BaseException) -> None:
        """Ends the leg after its error. Raises an Unavailable one with the unit's name."""
        session = self._session
        try:
            await self._frames.aclose()
            if isinstance(error, Unavailable):
                raise await session.held.missed(self.replica, error, waits=self._waits) from error
        finally:
            # A leg that began on K and V that were sent may fail for these; without them the replica may do.
            if isinstance(error, KvloomError) and (not self._begin_at or session.progress.begun):
                session.candidates.refused.add(self.replica)
            if self._end(let_go=isinstance(error, REFUSALS)):
                await session.drop_following()

    async def aclose(self) -> None:
        """Ends the request where it is, if it has not ended."""
        if self._state is LegState.CONTINUED:
            await self._next.aclose()
        elif self._state is LegState.UNASKED:
            self._state = LegState.OVER
        elif self._state is LegState.STREAMING:
            closed = False
            try:
                await self._frames.aclose()
                closed = True
            finally:
                if self._end(let_go=closed):
                    await self._session.drop_following()

    def _end(self, *, let_go: bool) -> bool:
        """Ends the leg. Returns whether the request ran here."""
        session = self._session
        self._state, ran = LegState.OVER, session.running is self
        if ran:
            session.running = None
        session.progress.tell()
        session.held.is_to_compute(self.replica, 0)
        if let_go:
            session.held.let_go(self.replica, "work", self.name)
        return ran
