"""A gateway mirrors its fleet: it copies the controller's specification and status, and sends edits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from kvloom.cluster.edits import Edit, UnitEdit
from kvloom.cluster.launcher import Change, Counted, Edited, News, Snapshot, UnitSeen
from kvloom.cluster.state import ABSENT, ComponentStatus, FleetSpec, FleetStatus, Outlook, outlook
from kvloom.types.errors import KvloomError, Unavailable

_log = logging.getLogger(__name__)

Said = Edit | UnitSeen | Counted
"""A message of a gateway to its controller."""


class Mirror:
    """A copy that only the controller's news change. A caller that wants a change sends an edit, and waits
    until the copy agrees."""

    def __init__(self, snapshot: Snapshot, send: Callable[[Said], None]) -> None:
        """`send` hands a message to the controller, in order."""
        self._take(snapshot)
        self.send = send
        self._followers: list[Callable[[Collection[str]], None]] = []
        self._news = asyncio.Event()
        self._over = False
        self._number = 0
        self._edits: dict[int, asyncio.Future[tuple[str, ...]]] = {}

    def follow(self, follower: Callable[[Collection[str]], None]) -> None:
        """Calls `follower` with the names of units and components each time that something of them
        changed."""
        self._followers.append(follower)

    def process(self, component: str) -> ComponentStatus:
        return self.status.processes.get(component, ABSENT)

    def outlook(self, unit: str) -> Outlook:
        return outlook(self.spec.units.get(unit), self.process(unit))

    def heed(self, news: News) -> None:
        """Takes in what the controller says, in its order."""
        match news:
            case Snapshot():
                names = [*self.spec.units, *self.status.processes, *news.spec.units, *news.status.processes]
                self._take(news)
                self._tell(dict.fromkeys(names))
            case Change():
                self._change(news)
                self._tell(dict.fromkeys([*news.units, *news.processes]))
            case Edited(number, overrode, refused):
                answer = self._edits.get(number)
                if answer is not None and not answer.done():
                    if refused is None:
                        answer.set_result(overrode)
                    else:
                        answer.set_exception(KvloomError.from_wire(refused))

    async def edit(self, units: dict[str, UnitEdit] | None = None, **fields: Any) -> tuple[str, ...]:
        """Sends an edit, and returns once the controller has taken it in and the copy has it. fields: other
        fields of `Edit`. Returns the fields in which it overrode somebody else's edit of the same time.
        Raises the error with which the controller refuses it."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        self._edits[number] = answer
        try:
            self.send(Edit(number=number, base=self.spec.revision, units=units or {}, **fields))
            while not answer.done():
                await self._next(answer)
            overrode = answer.result()
            if overrode:
                _log.warning(
                    "somebody else has changed %s at the same time; the last one wins", ", ".join(overrode)
                )
            return overrode
        finally:
            del self._edits[number]

    async def until(self, done: Callable[[], bool]) -> None:
        """Waits until `done` holds of the copy. Raises Unavailable if the gateway ends before."""
        while not done():
            await self._next()

    def give_up(self) -> None:
        """Ends all waits, because the gateway ends."""
        self._over = True
        self._ring()

    async def _next(self, answer: asyncio.Future[tuple[str, ...]] | None = None) -> None:
        if self._over:
            raise Unavailable("the gateway is ending, and gives up what it was ordered")
        news = self._news
        if answer is None:
            await news.wait()
            return
        ringing: asyncio.Future[bool] = asyncio.ensure_future(news.wait())
        try:
            either: set[asyncio.Future[Any]] = {answer, ringing}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ringing.cancel()

    def _take(self, snapshot: Snapshot) -> None:
        self.spec: FleetSpec = replace(snapshot.spec, units=dict(snapshot.spec.units))
        self.status: FleetStatus = snapshot.status.copy()
        self.seq = snapshot.seq

    def _change(self, change: Change) -> None:
        units, processes = self.spec.units, self.status.processes
        for name, unit in change.units.items():
            if unit is None:
                units.pop(name, None)
            else:
                units[name] = unit
        for name, process in change.processes.items():
            if process is None:
                processes.pop(name, None)
            else:
                processes[name] = process
        for name, node in change.nodes.items():
            if node is None:
                self.status.nodes.pop(name, None)
            else:
                self.status.nodes[name] = node
        if change.spec is not None:
            self.spec = replace(change.spec, units=units)
        if change.rolls:
            self.status = replace(self.status, steps=[])
        self.status.steps.extend(change.steps)
        self.seq = change.seq

    def _tell(self, names: Collection[str]) -> None:
        for follower in self._followers:
            follower(names)
        self._ring()

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
