"""A request as its caller sees it: frames of events, until every choice has ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvloom.engine.sequence import Sequence, Status, StreamId
from kvloom.types.request import EndEvent, Event, StartGenerate, TokenEvent


@dataclass(slots=True, eq=False)
class Stream:
    """id: no other live stream's. sequences: the choices, in order. Events are held back until
    `body.interval` of a choice have gathered, it is a choice's first token, or a choice ends."""

    id: StreamId
    body: StartGenerate
    sequences: list[Sequence]
    _events: list[Event] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _open: int = field(init=False)

    def __post_init__(self) -> None:
        self._open = len(self.sequences)

    @property
    def ended(self) -> bool:
        return self._open == 0

    @property
    def live(self) -> list[Sequence]:
        """The choices that have not ended, and are not about to."""
        return [one for one in self.sequences if not one.cancelled and one.status is not Status.ENDED]

    @property
    def in_job(self) -> bool:
        return any(sequence.in_job for sequence in self.sequences)

    def add(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, EndEvent):
            self._open -= 1
        first = isinstance(event, TokenEvent) and event.index == 0
        if first or isinstance(event, EndEvent) or self._full:
            self._ready.set()

    def extend(self, events: list[TokenEvent]) -> None:
        """Tokens of one choice, of which none is its last."""
        self._events += events
        if self._full:
            self._ready.set()

    @property
    def _full(self) -> bool:
        return len(self._events) >= self.body.interval * max(1, self._open)

    async def frame(self) -> tuple[list[Event], bool]:
        """All events since the last frame, waiting for one, and whether they are the last."""
        await self._ready.wait()
        self._ready.clear()
        events, self._events = self._events, []
        return events, self.ended
