"""A request as its caller sees it: frames of events, until every choice has ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvloom.engine.sequence import Sequence, Status, StreamId
from kvloom.types.request import EndEvent, Event, StartGenerate, TokenEvent


@dataclass(slots=True, eq=False)
class Stream:
    """The events of one request on their way to its caller. They are held back until `body.interval` of a
    choice have gathered, one is a choice's first token, or a choice ends."""

    id: StreamId
    """No other live stream has this id."""
    body: StartGenerate
    sequences: list[Sequence]
    """The choices, in order."""
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
        """Adds a choice's next event."""
        self._events.append(event)
        if isinstance(event, EndEvent):
            self._open -= 1
            self._ready.set()
        elif (isinstance(event, TokenEvent) and event.index == 0) or len(
            self._events
        ) >= self.body.interval * self._open:
            self._ready.set()

    def extend(self, events: list[TokenEvent]) -> None:
        """Adds tokens of one choice, of which none is its last."""
        self._events += events
        if len(self._events) >= self.body.interval * self._open:
            self._ready.set()

    async def frame(self) -> tuple[list[Event], bool]:
        """Waits for an event. Returns all since the last frame, and whether they are the last."""
        await self._ready.wait()
        self._ready.clear()
        events, self._events = self._events, []
        return events, self._open == 0
