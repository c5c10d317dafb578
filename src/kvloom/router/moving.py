"""Moves a running request to another replica while its stream goes on (Llumnix, section 4.2)."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvloom.core.clock import Clock
from kvloom.core.errors import BadRequest, KvloomError, Unavailable
from kvloom.core.request import Made
from kvloom.core.verbs import PrepRecv, RemoteSend
from kvloom.router.replica import Replica

if TYPE_CHECKING:
    from kvloom.router.call import Call

PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds until the source is told again that it is over
ROUNDS: Final = 6  # of copying while it decodes; what has grown meanwhile is the next one's


class Stage(Enum):
    """copying: it runs at the source. held: it stands still there. handed: it runs at the target. stayed: it
    runs at the source, or has ended."""

    COPYING = "copying"
    HELD = "held"
    HANDED = "handed"
    STAYED = "stayed"


_LEGAL = {
    (Stage.COPYING, Stage.HELD),
    (Stage.COPYING, Stage.STAYED),
    (Stage.HELD, Stage.HANDED),
    (Stage.HELD, Stage.STAYED),
}


class Move:
    """Of one call, from `source`, where it runs, to `target`. What is sent is cached at the target, and the
    request begins there with it as with any prefix; so a move that fails has cost nothing but copies."""

    def __init__(self, call: Call, source: Replica, target: Replica, clock: Clock) -> None:
        self.stage = Stage.COPYING
        self._clock = clock
        self._call = call
        self._source = source
        self._target = target
        self._name = call.name
        self._page = source.form.tokens_per_block if source.form else 1
        self._copied: dict[int, int] = {}  # tokens of each choice's context that the target has
        self._copies = 0

    def become(self, stage: Stage) -> None:
        """Raises ValueError where the step from the present stage is illegal."""
        if (self.stage, stage) not in _LEGAL:
            raise ValueError(f"a move that is {self.stage.value} cannot become {stage.value}")
        self.stage = stage

    async def run(self) -> None:
        """Raises KvloomError where the request stays, or goes on in another way: its stream never suffers."""
        try:
            await self._copy_while_it_runs()
            standing = await self._source.client.hold(self._name)
            self.become(Stage.HELD)
            await self._copy(standing.made)
            await self._call.hand_over(self._source, self._target, standing.made)
        except BaseException:
            held = self.stage is Stage.HELD
            self.become(Stage.STAYED)
            if held:
                with suppress(KvloomError):
                    await self._source.client.resume(self._name)
            raise
        self.become(Stage.HANDED)
        await self._end_at_the_source()

    async def _end_at_the_source(self) -> None:
        """Whose stream then ends, and the target's follows. Where the source is gone for good, its stream
        breaks by itself."""
        for pause in PAUSES:
            with suppress(Unavailable):
                await self._source.client.abort(self._name)
                return
            await self._clock.sleep(pause)

    async def _copy_while_it_runs(self) -> None:
        for _ in range(ROUNDS):
            made = self._call.progress.made
            if not made or not all(one.tokens for one in made):
                raise BadRequest(f"request {self._name} is not decoding", param="request")
            if not self._grown(made, self._page):
                return
            await self._copy(made, self._page)

    async def _copy(self, made: list[Made], page: int = 1) -> None:
        """All that the choices have K and V of, as far as it fills pages of so many tokens: what a running
        request is sent from."""
        for one in self._grown(made, page):
            context = [*self._call.prompt, *one.tokens]
            self._copied[one.choice] = end = (len(context) - 1) // page * page
            await self._copy_context(context, end)

    def _grown(self, made: list[Made], page: int) -> list[Made]:
        """The choices of which a page is to be copied. The last token has no K and V yet."""
        length = len(self._call.prompt) - 1
        return [one for one in made if length + len(one.tokens) - self._copied.get(one.choice, 0) >= page]

    async def _copy_context(self, context: list[int], end: int) -> None:
        model, target = self._call.model, self._target.client
        self._copies += 1
        name = f"{self._name}>{self._copies}"
        room = PrepRecv(model=model, request=name, prompt=context, end=end, sender=self._source.form)
        try:
            spot = await target.prep_recv(room)
            if spot.matched < spot.end:
                order = RemoteSend(
                    model=model,
                    request=self._name,
                    prompt=context,
                    address=spot.address,
                    peer=spot.peer,
                    begin=spot.matched,
                    end=spot.end,
                    priority=self._call.body.priority,
                )
                await self._source.client.remote_send(order)
        finally:
            with suppress(KvloomError):
                await target.abort(name)  # what has arrived stays cached
