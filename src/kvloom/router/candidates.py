"""Who may be asked for one request, from its arrival to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from kvloom.router.call import Call
from kvloom.router.failures import Failures
from kvloom.router.fleet import Fleet
from kvloom.router.replica import Replica
from kvloom.router.waiting import WaitingRoom
from kvloom.types.errors import KvloomError, Unavailable

_log = logging.getLogger(__name__)


class Candidates:
    """now: the model's replicas at this moment; units come and go while a request waits. fleet: those that
    may still be asked."""

    def __init__(self, call: Call, fleet: Fleet, now: Callable[[], Fleet], room: WaitingRoom) -> None:
        self.fleet = fleet
        self._call = call
        self._now = now
        self._room = room
        self._seen: set[Replica] = set(fleet.replicas)
        self._failures = Failures(call)

    def go_on_after(self, error: KvloomError) -> None:
        """Raises `error` where nobody is left to ask."""
        call, failures = self._call, self._failures
        self.fleet = fleet = failures.keep(self._with_newcomers(), error)
        over = call.aborted and call.let_in  # its ends are told next
        if not (over or (failures.may_go_on(error) and (fleet.up or failures.awaited(fleet)))):
            raise error
        if not over:
            whither = "goes elsewhere" if fleet.up else "waits for a restart"
            _log.warning("request %s: %s; it %s", call.body.request, error.message, whither)

    async def until_somebody_is_up(self) -> None:
        """Or nobody will be soon. Raises Unavailable where that takes too long."""
        try:
            await self._room.wait_while(self._nobody_yet, self._call.model, self._call.body.request)
        except TimeoutError:
            names = ", ".join(replica.name for replica in self._failures.awaited(self.fleet))
            raise Unavailable(
                f"no unit that serves {self._call.model} is up; {names} is being started, which takes longer "
                f"than the {self._room.seconds:g} s that requests wait",
                retry_after=1,
            ) from None

    def _nobody_yet(self) -> bool:
        call, fleet = self._call, self._with_newcomers()
        return bool(
            self._failures.awaited(fleet) and not fleet.up and not call.aborted and not call.progress.unwanted
        )

    def _with_newcomers(self) -> Fleet:
        """Replicas that were not there when the request came, but those of shorter contexts than it was
        promised."""
        found = [one for one in self._now().replicas if one not in self._seen]
        if found:
            self._seen.update(found)
            fit = [one for one in found if one.card.context_length >= self._call.course.needs]
            self.fleet = replace(self.fleet, replicas=(*self.fleet.replicas, *fit))
        return self.fleet
