"""The replicas that may be asked for one request, and the room in which it waits for one of them to come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from kvloom.router.held import SessionHeld
from kvloom.router.progress import RequestProgress
from kvloom.router.replicas import Fleet, Replica
from kvloom.types.errors import (
    EngineDied,
    KvloomError,
    OutOfBlocks,
    QueueFull,
    RequestQuarantined,
    Unavailable,
    UnknownModel,
)
from kvloom.types.request import StartGenerate

FAILURES: Final = 3
"""An engine's failure may be the request's doing: the request goes on after so many failures between two of
its tokens, and no more. An engine's death counts in `Deaths` instead."""

_log = logging.getLogger(__name__)


class Lost(KvloomError):
    """Says that the engine has ended all that was left of a request with an error, so that another engine may
    go on."""


_ELSEWHERE: Final = (Unavailable, QueueFull, OutOfBlocks, Lost)  # what one replica says, another may not


class WaitingRoom:
    """Requests wait here for a unit that is to come."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The longest time that a request waits."""
        self._bells: dict[str, dict[str, asyncio.Event]] = {}  # by model and by request

    @property
    def waiting(self) -> dict[str, int]:
        """Returns the number of requests that wait now, by model."""
        return {model: len(bells) for model, bells in self._bells.items()}

    def tell(self, models: Iterable[str]) -> None:
        """Wakes the requests for these models, because something has changed that may end their wait."""
        for model in models:
            for bell in self._bells.get(model, {}).values():
                bell.set()

    def tell_one(self, model: str, request: str) -> None:
        """Wakes this request, if it waits."""
        if bell := self._bells.get(model, {}).get(request):
            bell.set()

    async def wait_while(self, needed: Callable[[], bool], model: str, request: str) -> None:
        """Waits as long as `needed` holds. Raises TimeoutError if that is longer than the room's seconds."""
        if not needed():
            return
        bells = self._bells.setdefault(model, {})
        bell = bells[request] = asyncio.Event()
        try:
            async with asyncio.timeout(self.seconds):
                while needed():
                    await bell.wait()
                    bell.clear()
        finally:
            del bells[request]
            if not bells:
                del self._bells[model]


class Candidates:
    """The replicas that may be asked for one request, from its arrival to its end."""

    def __init__(
        self,
        body: StartGenerate,
        progress: RequestProgress,
        held: SessionHeld,
        serving: Callable[[], Fleet],
        room: WaitingRoom,
    ) -> None:
        """serving: gives the model's replicas as they are now, and raises UnknownModel if there are none."""
        self.fleet = serving()
        """The replicas that may still be asked."""
        self.needs = 0
        """Tokens of context that a replica must have: as many as the first one that let the request in
        allowed; 0 before."""
        self.refused: set[Replica] = set()
        """Replicas that would not, or could not, generate."""
        self._body = body
        self._progress = progress
        self._held = held
        self._serving = serving
        self._room = room
        self._seen: set[Replica] = set(self.fleet.replicas)
        self._tokens = 0
        self._failures = 0

    @property
    def _let_in(self) -> bool:
        """Returns whether a replica has let the request in."""
        return self.needs > 0

    def let_in(self, replica: Replica) -> None:
        """Notes that the replica has let the request in, which promises its caller so long a context."""
        most = len(self._body.prompt) + self._body.sampling.max_tokens
        self.needs = self.needs or min(most, replica.card.context_length)

    def go_on_after(self, error: KvloomError) -> None:
        """Takes in a failure, and leaves in `fleet` the replicas that may still be asked. Raises `error` if
        there are none."""
        self.fleet = fleet = self._less(self._with_newcomers(), error)
        if self._held.aborted and self._let_in:
            return  # Its ends are told next.
        if not (self._may_go_on(error) and (fleet.up or self._awaited(fleet))):
            raise error
        whither = "goes elsewhere" if fleet.up else "waits for a restart"
        _log.warning("request %s: %s; it %s", self._body.request, error.message, whither)

    def _may_go_on(self, error: KvloomError) -> bool:
        """Counts a failure. Returns whether a plain start_generate elsewhere may still give the rest: it is
        not the request itself that a replica has refused."""
        if self._progress.tokens > self._tokens:
            self._tokens, self._failures = self._progress.tokens, 0
        if isinstance(error, Unavailable | Lost) and not isinstance(error, EngineDied):
            self._failures += self._let_in
        if self._held.aborted or self._failures > FAILURES or isinstance(error, RequestQuarantined):
            return False
        return isinstance(error, _ELSEWHERE) or not (self.refused or self._progress.begun)

    def _less(self, fleet: Fleet, error: KvloomError) -> Fleet:
        """Returns the fleet without two kinds of replicas: those that have refused the request, unless
        they are awaited, and those whose context is shorter than what the replica that let it in has
        promised. If the connection to that one broke, its process may be another by now, so refusals are
        forgotten; `FAILURES` bounds how often."""
        if self._let_in and isinstance(error, Unavailable):
            self.refused.clear()
        refused = {one for one in self.refused if not self._awaits(one)}
        short = {one for one in fleet.replicas if one.card.context_length < self.needs}
        return fleet.without(refused | short)

    def _awaits(self, replica: Replica) -> bool:
        """Returns whether the replica is worth waiting for: its unit is awaited, or, if no controller says
        so, it has died with a request that it had let in."""
        return replica.awaited or (self._let_in and replica.unit.lost)

    def _awaited(self, fleet: Fleet) -> list[Replica]:
        return [replica for replica in fleet.replicas if self._awaits(replica)]

    async def until_somebody_is_up(self) -> None:
        """Waits until a replica is up, none will be soon, or the caller wants no more. Raises Unavailable
        if that takes too long."""
        model = self._body.model
        try:
            await self._room.wait_while(self._nobody_yet, model, self._body.request)
        except TimeoutError:
            names = ", ".join(replica.name for replica in self._awaited(self.fleet))
            raise Unavailable(
                f"no unit that serves {model} is up; {names} is being started, which takes longer than the "
                f"{self._room.seconds:g} s that requests wait",
                retry_after=1,
            ) from None

    def _nobody_yet(self) -> bool:
        fleet = self._with_newcomers()
        return bool(
            self._awaited(fleet)
            and not fleet.up
            and not self._held.aborted
            and not (self._let_in and self._progress.unwanted)
        )

    def _with_newcomers(self) -> Fleet:
        """Adds to the fleet the replicas that have come since the request did, but for those of too short a
        context, and returns it: units come and go while a request waits."""
        found: list[Replica] = []
        with suppress(UnknownModel):  # by now nobody may serve it any more
            found = [one for one in self._serving().replicas if one not in self._seen]
        if found:
            self._seen.update(found)
            fit = [one for one in found if one.card.context_length >= self.needs]
            self.fleet = replace(self.fleet, replicas=(*self.fleet.replicas, *fit))
        return self.fleet
