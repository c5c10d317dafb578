"""Moves a running request to another replica while its stream goes on (Llumnix, section 4.2).

The K and V that the request has are copied while it decodes, in rounds, of which each has only what has
grown meanwhile. Then the request stands still at the source, the rest is copied, the target lets the request
in with all tokens that it has, and the source is told to end it. What is copied is cached at the target, and
the request begins there with it as with any prefix; so a migration that fails has cost nothing but copies. A
request that waits has nothing to copy: it is let in at the target, and then ended at the source. The same
goes for one whose context the target computes sooner than it is copied, but that it stands still meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import Enum
from typing import Any, Final

from kvloom.router.held import REFUSALS, PeerReservation
from kvloom.router.replicas import Replica
from kvloom.router.session import Leg, Session
from kvloom.types.clock import Clock, together
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable
from kvloom.types.request import Made, StartGenerate
from kvloom.types.verbs import Prepared, PrepRecv, RemoteSend

ROUNDS: Final = 6  # of copying while it decodes; what has grown meanwhile is the next one's
PIECE: Final = 512  # tokens copied at a time
PAUSE: Final = 2.0  # times what a piece has taken: until the next one
LULL: Final = 0.5  # seconds for which the last stage waits at most for a step to end
STANDSTILL: Final = 2.0  # seconds for which the request stands still at most; then it goes on where it is
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.6  # seconds until the source is told again what it has not heard

_log = logging.getLogger(__name__)


class MigrationStage(Enum):
    """The stages of a migration."""

    WAITING = "waiting"
    """The request has yet to begin at the source."""
    COPYING = "copying"
    """The request runs at the source."""
    HELD = "held"
    """The request stands still at the source, or may."""
    HANDED = "handed"
    """The request is the target's."""
    STAYED = "stayed"
    """The request is the source's, or has ended, or goes on in another way."""


_LEGAL = {
    (MigrationStage.WAITING, MigrationStage.HANDED),
    (MigrationStage.WAITING, MigrationStage.STAYED),
    (MigrationStage.COPYING, MigrationStage.HELD),
    (MigrationStage.COPYING, MigrationStage.STAYED),
    (MigrationStage.HELD, MigrationStage.HANDED),
    (MigrationStage.HELD, MigrationStage.STAYED),
}


class Migration:
    """The migration of one session from `source`, which generates it, to `target`."""

    def __init__(self, session: Session, source: Leg, target: Replica, clock: Clock) -> None:
        self.stage = (
            MigrationStage.COPYING if session.progress.begun or session.body.n > 1 else MigrationStage.WAITING
        )
        self.rooms: list[Room] = []
        """The rooms at the target that are not given back yet."""
        self.copies = True
        """Whether the context is copied. If not, the target computes it again, and the request stands still
        meanwhile."""
        self._clock = clock
        self._session = session
        self._source = source
        self._client = source.replica.unit.client
        self._target = target
        form = source.replica.card.form
        self._page = form.tokens_per_block if form else 1
        self._copied: dict[int, int] = {}  # tokens of each choice's context that the target has

    @property
    def context(self) -> int:
        """Returns the tokens of context that the request has at the source; 0 if it waits."""
        if self.stage is MigrationStage.WAITING:
            return 0
        made = self._session.progress.made
        return len(self._session.prompt) + sum(len(one.tokens) for one in made)

    def become(self, stage: MigrationStage) -> None:
        """Raises ValueError if the step from the present stage is illegal."""
        if (self.stage, stage) not in _LEGAL:
            raise ValueError(f"a migration that is {self.stage.value} cannot become {stage.value}")
        self.stage = stage

    async def run(self) -> None:
        """Raises KvloomError if the request stays, or goes on in another way; its stream never suffers."""
        name, stands_still = self._source.name, self.stage is not MigrationStage.WAITING
        try:
            rooms: dict[int, Room] = {}
            if stands_still and self.copies:
                await self._copy_while_it_runs()
                rooms = await self._last_rooms(await self._step())  # it comes at the end of the next step
            async with asyncio.timeout(STANDSTILL):
                await (self._go_over(rooms) if stands_still else self._hand_over([]))
        except BaseException as error:
            held = self.stage is MigrationStage.HELD
            self.become(MigrationStage.STAYED)
            await self._to_its_end(self._client.resume if held else None)
            if isinstance(error, TimeoutError):
                problem = (
                    f"request {name} stood still for {STANDSTILL:g} s, and stays"
                    if stands_still
                    else f"{self._target.name} did not let request {name} in for {STANDSTILL:g} s"
                )
                raise Unavailable(problem) from None
            raise
        await self._to_its_end(self._client.abort)  # its stream then ends, and the target's follows

    async def _go_over(self, rooms: dict[int, Room]) -> None:
        """Lets the request stand still, copies the rest, and hands it over."""
        self.become(MigrationStage.HELD)  # perhaps even if the answer is lost
        sends = {choice: order for choice, room in rooms.items() if (order := room.order())}
        standing = await self._client.hold(self._source.name, list(sends.values()))
        made = standing.made
        if len(standing.sent) != len(sends):
            replica = self._source.replica.name
            raise Unavailable(f"{replica} told of {len(standing.sent)} sends, not of {len(sends)}")
        self._copied |= {choice: room.reservation.matched for choice, room in rooms.items()}
        self._copied |= dict(zip(sends, standing.sent, strict=True))
        behind = [one for one in made if self.copies and self._missing(one) > 0]
        taken = None if behind else rooms.get(made[0].choice)
        async with together() as group:
            for room in rooms.values():
                if room is not taken:
                    group.create_task(room.free())
        for one in behind:
            await self._copy(one, self._end(one))
        await self._hand_over(made, taken)

    async def _hand_over(self, made: list[Made], room: Room | None = None) -> None:
        """Lets the target go on after `made`, in `room` if that has what it needs. What the source tells
        before it hears of it counts, and the same of the target's is passed over."""
        name = room.name if room else self._session.another_name()
        await self._session.hand_over(self._source, self._target, made, name)
        self.become(MigrationStage.HANDED)
        if room:
            self.rooms.remove(room)

    async def _to_its_end(self, verb: Callable[[str], Coroutine[Any, Any, None]] | None) -> None:
        """Tells the source the verb, and gives the rooms back, whoever waits for it."""
        if verb is None and not self.rooms:
            return
        await asyncio.shield(self._session.tasks.create_task(self.settle(verb)))

    async def settle(self, verb: Callable[[str], Coroutine[Any, Any, None]] | None) -> None:
        """Tells the source the verb until it has heard it, and leaves no room at the target."""
        pause = FIRST_PAUSE
        while verb and self._session.running is self._source:
            try:
                await verb(self._source.name)
                break
            except Unavailable:
                await self._clock.sleep(pause)
            except KvloomError as error:  # the end of its lease does it
                _log.warning("%s: request %s: %s", self._source.replica, self._source.name, error.message)
                break
            pause = min(2 * pause, LONGEST_PAUSE)
        for room in self.rooms:
            await room.free()

    # -- copying ----------------------------------------------------------------------------------------

    async def _copy_while_it_runs(self) -> None:
        """Copies full pages of each choice, one choice after the other: what they have in common goes
        once."""
        for _ in range(ROUNDS):
            grown = [one for one in self._made() if self._missing(one) >= self._page]
            if not grown:
                return
            for one in grown:
                await self._copy_pages(one)

    async def _copy_pages(self, made: Made) -> None:
        """Copies in pieces, with a pause after each: copying takes cycles and bandwidth of those who decode
        beside it."""
        end, done = self._end(made) // self._page * self._page, self._copied.get(made.choice, 0)
        while done < end:
            began = self._clock.now()
            done = min(end, max(done + PIECE, self._page) // self._page * self._page)
            await self._copy(made, done)
            if done < end:
                await self._clock.sleep(PAUSE * (self._clock.now() - began))

    async def _copy(self, made: Made, end: int) -> None:
        room = self._room(made, end)
        await room.reserve(end)
        async with together() as group:
            watching = group.create_task(self._watch())
            if order := room.order(end):
                await self._client.remote_send(order)
            watching.cancel()
        await room.free()
        self.rooms.remove(room)
        self._copied[made.choice] = end

    async def _watch(self) -> None:
        """Raises BadRequest once the request runs at the source no more. What is sent would then be computed
        for nobody, while the room for it is kept from others; two migrations could wait for each other's."""
        while self._session.running is self._source:
            await self._session.progress.news()
        raise BadRequest(f"request {self._source.name} has ended, or goes on in another way", param="request")

    async def _step(self) -> float | None:
        """Waits until a step has ended, and returns the seconds that it took. There is a whole step then in
        which to make room and to tell the source: what has grown by more than that step has too little room,
        and stands still until there is more. Returns None if no end was heard of: the caller is told of
        several steps at a time, or a step is longer than `LULL`."""
        if self._session.body.interval > 1:
            return None
        try:
            async with asyncio.timeout(LULL):
                await self._session.progress.news()
        except TimeoutError:
            return None
        step = self._session.progress.step
        return step if step and step <= LULL else None

    async def _last_rooms(self, step: float | None) -> dict[int, Room]:
        """Returns rooms by choice, for what the choice will have when the step under way is over, if it is
        the last. Choices for which there is no room beside the others' have none."""
        rooms: dict[int, Room] = {}

        async def reserve(one: Made) -> None:
            end = self._end(one) + 1
            room = self._room(one, end)
            with suppress(OutOfBlocks, QueueFull):
                await room.reserve(end, due=step)
                rooms[one.choice] = room

        async with together() as group:
            for one in self._made():
                group.create_task(reserve(one))
        return rooms

    def _room(self, made: Made, end: int) -> Room:
        """Returns a room for the choice's context up to `end`, not reserved yet."""
        session = self._session
        context = [*session.prompt, *made.tokens][:end]
        room = Room(session.another_name(), context, self._source, self._target, session.body)
        self.rooms.append(room)
        return room

    def _made(self) -> list[Made]:
        made = self._session.progress.made
        here = self._session.running is self._source
        if not (here and made and all(one.tokens for one in made)):
            raise BadRequest(f"request {self._source.name} is not decoding", param="request")
        return made

    def _end(self, made: Made) -> int:
        """Returns up to which token there are K and V: the last one has none anywhere."""
        return len(self._session.prompt) + len(made.tokens) - 1

    def _missing(self, made: Made) -> int:
        """Returns the number of tokens of which the target has no K and V yet."""
        return self._end(made) - self._copied.get(made.choice, 0)


class Room:
    """A reservation at the target for the K and V of `context`, under an id of its own. It counts as no call
    there, so a drain does not wait for it."""

    def __init__(
        self, name: str, context: list[int], source: Leg, target: Replica, body: StartGenerate
    ) -> None:
        self.name = name
        self._context = context
        self._source = source
        self._target = target
        self._body = body
        self._asked: asyncio.Future[Prepared] | None = None

    async def reserve(self, end: int, *, due: float | None = None) -> None:
        """Reserves the room up to `end`. due: seconds until the request is to begin at the target. Who stops
        waiting for the answer still has to free the room."""
        sender = self._source.replica.card
        body = PrepRecv(
            model=sender.name,
            request=self.name,
            prompt=self._context,
            end=end,
            sender=sender.form,
            due=due,
            salt=self._body.salt,
        )
        self._asked = asyncio.ensure_future(self._target.unit.client.prep_recv(body))
        await asyncio.shield(self._asked)

    @property
    def reservation(self) -> PeerReservation:
        assert self._asked is not None, "reserve comes first"
        model = self._source.replica.card.name
        return PeerReservation(self._target, model, self._context, self._asked.result(), self._body.salt)

    def order(self, end: int | None = None) -> RemoteSend | None:
        """Returns the order to the source to fill the room, up to `end` or as far as there is room; None if
        nothing is to be sent."""
        spot, body = self.reservation, self._body
        last = spot.end if end is None else end
        return spot.order(self._source.name, spot.matched, last, body.priority, body.tenant)

    async def free(self) -> None:
        """Gives the room back; what has arrived stays cached. If the target does not answer its lease ends
        it."""
        asked, self._asked = self._asked, None
        if asked is not None:
            await asyncio.wait([asked])
            if not isinstance(asked.exception(), REFUSALS):
                with suppress(KvloomError):
                    await self._target.unit.client.abort(self.name)
