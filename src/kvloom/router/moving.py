"""Moves a request to another replica while its stream goes on (Llumnix, section 4.2).

One that waits has nothing to copy: it is let in there, and then ended here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from kvloom.router.replica import Replica
from kvloom.router.room import Room
from kvloom.types.clock import Clock, together
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable
from kvloom.types.request import Made

if TYPE_CHECKING:
    from kvloom.router.call import Call

ROUNDS: Final = 6  # of copying while it decodes; what has grown meanwhile is the next one's
PIECE: Final = 512  # tokens copied at a time
PAUSE: Final = 2.0  # times what a piece has taken: until the next one
LULL: Final = 0.5  # seconds for which the last stage waits at most for a step to end
STANDSTILL: Final = 2.0  # seconds for which it stands still at most; then it goes on where it is
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.6  # seconds until the source is told again what it has not heard

_log = logging.getLogger(__name__)


class Stage(Enum):
    """waiting: it has yet to begin at the source. copying: it runs there. held: it stands still there, or
    may. handed: it is the target's. stayed: it is the source's, or has ended, or goes on in another way."""

    WAITING = "waiting"
    COPYING = "copying"
    HELD = "held"
    HANDED = "handed"
    STAYED = "stayed"


_LEGAL = {
    (Stage.WAITING, Stage.HANDED),
    (Stage.WAITING, Stage.STAYED),
    (Stage.COPYING, Stage.HELD),
    (Stage.COPYING, Stage.STAYED),
    (Stage.HELD, Stage.HANDED),
    (Stage.HELD, Stage.STAYED),
}


class Move:
    """Of one call, from `source`, where it runs, to `target`. What is sent is cached at the target, and the
    request begins there with it as with any prefix; so a move that fails has cost nothing but copies."""

    def __init__(self, call: Call, source: Replica, target: Replica, clock: Clock) -> None:
        self.stage = Stage.COPYING if call.progress.begun or call.body.n > 1 else Stage.WAITING
        self._clock = clock
        self._call = call
        self._source = source
        self._target = target
        self._name = call.name
        self._page = source.form.tokens_per_block if source.form else 1
        self._copied: dict[int, int] = {}  # tokens of each choice's context that the target has
        self._rooms: list[Room] = []

    def become(self, stage: Stage) -> None:
        """Raises ValueError where the step from the present stage is illegal."""
        if (self.stage, stage) not in _LEGAL:
            raise ValueError(f"a move that is {self.stage.value} cannot become {stage.value}")
        self.stage = stage

    async def run(self) -> None:
        """Raises KvloomError where the request stays, or goes on in another way: its stream never suffers."""
        if self.stage is Stage.WAITING:
            await self._pass_on()
            return
        source = self._source.client
        try:
            await self._copy_while_it_runs()
            rooms = await self._last_rooms(await self._step())  # it comes at the end of the next one
            async with asyncio.timeout(STANDSTILL):
                await self._go_over(rooms)
        except BaseException as error:
            held = self.stage is Stage.HELD
            self.become(Stage.STAYED)
            await self._to_its_end(source.resume if held else None)
            if isinstance(error, TimeoutError):
                problem = f"request {self._name} stood still for {STANDSTILL:g} s, and stays"
                raise Unavailable(problem) from None
            raise
        await self._to_its_end(source.abort)  # its stream then ends, and the target's follows

    async def _pass_on(self) -> None:
        """What the source tells before it hears of it counts, and the target's is passed over."""
        try:
            async with asyncio.timeout(STANDSTILL):
                await self._hand_over([], self._call.another_name())
        except BaseException as error:
            self.become(Stage.STAYED)
            if isinstance(error, TimeoutError):
                problem = f"{self._target.name} did not let request {self._name} in for {STANDSTILL:g} s"
                raise Unavailable(problem) from None
            raise
        self.become(Stage.HANDED)
        await self._to_its_end(self._source.client.abort)

    async def _go_over(self, rooms: dict[int, Room]) -> None:
        """It stands still from here on."""
        self.become(Stage.HELD)  # perhaps even where the answer is lost
        sends = {choice: order for choice, room in rooms.items() if (order := room.order())}
        standing = await self._source.client.hold(self._name, list(sends.values()))
        made = standing.made
        if len(standing.sent) != len(sends):
            raise Unavailable(f"{self._source.name} told of {len(standing.sent)} sends, not of {len(sends)}")
        self._copied |= {choice: room.matched for choice, room in rooms.items()}
        self._copied |= dict(zip(sends, standing.sent, strict=True))
        behind = [one for one in made if self._missing(one) > 0]
        taken = None if behind else rooms.get(made[0].choice)
        async with together() as group:
            for room in rooms.values():
                if room is not taken:
                    group.create_task(room.free())
        for one in behind:
            await self._copy(one, self._end(one))
        name = taken.name if taken else self._call.another_name()
        await self._hand_over(made, name)
        self.become(Stage.HANDED)
        if taken:
            self._rooms.remove(taken)

    async def _hand_over(self, made: list[Made], name: str) -> None:
        await self._call.hand_over(self._source, self._name, self._target, made, name)

    async def _to_its_end(self, verb: Callable[[str], Coroutine[Any, Any, None]] | None) -> None:
        """Whoever waits for it: the source is told the verb, and no room is left."""
        await asyncio.shield(self._call.tasks.create_task(self._settle(verb)))

    async def _settle(self, verb: Callable[[str], Coroutine[Any, Any, None]] | None) -> None:
        pause = FIRST_PAUSE
        while verb and self._call.course.runs(self._source, self._name):
            try:
                await verb(self._name)
                break
            except Unavailable:
                await self._clock.sleep(pause)
            except KvloomError as error:  # the end of its lease does it
                _log.warning("request %s at %s: %s", self._name, self._source.name, error.message)
                break
            pause = min(2 * pause, LONGEST_PAUSE)
        for room in self._rooms:
            await room.free()

    # -- copying ----------------------------------------------------------------------------------------

    async def _copy_while_it_runs(self) -> None:
        """Full pages of each choice, one choice after the other: what they have in common goes once."""
        for _ in range(ROUNDS):
            grown = [one for one in self._made() if self._missing(one) >= self._page]
            if not grown:
                return
            for one in grown:
                await self._copy_pages(one)

    async def _copy_pages(self, made: Made) -> None:
        """In pieces, with a pause after each: copying takes cycles and bandwidth of those who decode beside
        it."""
        end, done = self._end(made) // self._page * self._page, self._copied.get(made.choice, 0)
        while done < end:
            began = self._clock.now()
            done = min(end, max(done + PIECE, self._page) // self._page * self._page)
            await self._copy(made, done)
            if done < end:
                await self._clock.sleep(PAUSE * (self._clock.now() - began))

    async def _step(self) -> float | None:
        """Until a step has ended, and seconds that it took. There is a whole step then in which to make room
        and to tell the source: what has grown by more than that step has too little room, and stands still
        until there is more. None where no end was heard of: the caller is told of several steps at a time, or
        a step is longer than `LULL`."""
        if self._call.body.interval > 1:
            return None
        try:
            async with asyncio.timeout(LULL):
                await self._call.progress.news()
        except TimeoutError:
            return None
        step = self._call.progress.step
        return step if step and step <= LULL else None

    async def _last_rooms(self, step: float | None) -> dict[int, Room]:
        """By choice, for what it will have when the step under way is over, if it is the last. Those for whom
        there is no room beside the others' have none."""
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

    async def _copy(self, made: Made, end: int) -> None:
        room = self._room(made, end)
        await room.reserve(end)
        async with together() as group:
            watching = group.create_task(self._watch())
            await room.fill(end)
            watching.cancel()
        await room.free()
        self._rooms.remove(room)
        self._copied[made.choice] = end

    async def _watch(self) -> None:
        """Raises BadRequest once it runs at the source no more. What is sent would then be computed for
        nobody, while the room for it is kept from others; two moves could wait for each other's."""
        while self._call.course.runs(self._source, self._name):
            await self._call.progress.news()
        raise BadRequest(f"request {self._name} has ended, or goes on in another way", param="request")

    def _room(self, made: Made, end: int) -> Room:
        """For its context up to `end`."""
        room = Room(
            self._call.another_name(),
            [*self._call.prompt, *made.tokens][:end],
            source=self._source,
            target=self._target,
            request=self._name,
            priority=self._call.body.priority,
        )
        self._rooms.append(room)
        return room

    def _made(self) -> list[Made]:
        made = self._call.progress.made
        here = self._call.course.runs(self._source, self._name)
        if not (here and made and all(one.tokens for one in made)):
            raise BadRequest(f"request {self._name} is not decoding", param="request")
        return made

    def _end(self, made: Made) -> int:
        """Up to which token there are K and V: the last one has none anywhere."""
        return len(self._call.prompt) + len(made.tokens) - 1

    def _missing(self, made: Made) -> int:
        """Tokens of which the target has no K and V yet."""
        return self._end(made) - self._copied.get(made.choice, 0)
