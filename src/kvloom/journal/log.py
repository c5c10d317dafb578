"""Keeps the journal: an outbox in each process whose events others keep, the journal itself at the fleet's
controller, and its copies."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import msgspec

from kvloom.journal.records import Aged, Event, Journaled, Lost, Noted, Record
from kvloom.types.clock import Clock

KEPT: Final = 10_000  # records
KEPT_SECONDS: Final = 3600.0
MOST_WAITING: Final = 1000  # events of a process
MESSAGE_BYTES: Final = 3000
"""The most bytes of a message. With its frame it fits into a pipe that has room at all."""

_ID: Final = re.compile(r"(\d{1,15})-(\d{1,15})")


class RecordLog:
    """The last records, in their order. It keeps those of an hour, and no more than `most`."""

    def __init__(self, most: int = KEPT, seconds: float = KEPT_SECONDS) -> None:
        self.total = 0
        """The number of records up to now, kept or not."""
        self.over = False
        """Tells whether nothing more comes."""
        self._most = most
        self._seconds = seconds
        self._records: deque[Record] = deque()
        self._followers: list[Callable[[Sequence[Record]], None]] = []

    def follow(self, follower: Callable[[Sequence[Record]], None]) -> None:
        """Calls `follower` with what is new, and with nothing when nothing more comes."""
        self._followers.append(follower)

    def unfollow(self, follower: Callable[[Sequence[Record]], None]) -> None:
        self._followers.remove(follower)

    def take(self, records: Sequence[Record]) -> None:
        """Keeps what is new."""
        kept = self._records
        kept.extend(records)
        self.total += len(records)
        while len(kept) > self._most or (kept and kept[0].at < records[-1].at - self._seconds):
            kept.popleft()
        self._tell(records)

    def close(self) -> None:
        """Lets those who follow end."""
        self.over = True
        self._tell(())

    @property
    def first(self) -> int:
        """The place of the first record that is kept, of all up to now."""
        return self.total - len(self._records)

    def since(self, place: int, most: int = KEPT) -> list[Record]:
        """Returns the records from a place on, as far as they are kept; no more than `most`."""
        begin = max(0, place - self.first)
        return list(islice(self._records, begin, begin + most))

    def after(self, last: str) -> int:
        """Returns the place behind the record with this id, which may be before the first that is kept. For
        another journal's id, and for what is no id, that is the first place."""
        found = _ID.fullmatch(last)
        if found is None or not self._records or int(found[1]) != self._records[-1].journal:
            return self.first
        place = self.total - self._records[-1].number + int(found[2])
        return place if place <= self.total else self.first

    def _tell(self, records: Sequence[Record]) -> None:
        for follower in list(self._followers):
            follower(records)


class Journal(RecordLog):
    """Makes records of events, and keeps them."""

    def __init__(self, clock: Clock, *, epoch: float = 0.0, most: int = KEPT) -> None:
        """`epoch` is added to the clock's time to make the records' time."""
        super().__init__(most)
        self._clock = clock
        self._epoch = epoch
        self._began = int(epoch + clock.now()) if epoch else 0

    def add(self, component: str, event: Event | None) -> None:
        """Keeps an event of this moment, if there is one."""
        if event is not None:
            self._take(component, [Aged(0.0, event)])

    def note(self, component: str, noted: Noted) -> None:
        """Keeps the events that a component's process tells of."""
        lost: list[Aged] = []
        if noted.lost:
            lost = [Aged(0.0, Lost(count=noted.lost, reason="more happened at once than could be told"))]
        self._take(component, lost + noted.events)

    def _take(self, component: str, events: Sequence[Aged]) -> None:
        now = self._epoch + self._clock.now()
        made = [
            Record(
                journal=self._began,
                number=self.total + place,
                at=round(now - one.age, 6),
                component=component,
                event=one.event,
            )
            for place, one in enumerate(events, 1)
        ]
        if made:
            self.take(made)


class Outbox:
    """The events of one process that have yet to be told. If too many wait, new ones are lost and counted."""

    def __init__(self, clock: Clock, most: int = MOST_WAITING) -> None:
        self._clock = clock
        self._most = most
        self._events: deque[tuple[float, Event]] = deque()
        self._lost = 0

    def record(self, event: Event) -> None:
        """Satisfies `Recorder`."""
        if len(self._events) < self._most:
            self._events.append((self._clock.now(), event))
        else:
            self._lost += 1

    def next(self) -> Noted | None:
        """Returns the next message; None if there is nothing to tell."""
        if not self._events and not self._lost:
            return None
        now, size, events = self._clock.now(), 0, list[Aged]()
        while self._events:
            at, event = self._events[0]
            aged = Aged(round(now - at, 6), event)
            size += len(msgspec.json.encode(aged)) + 1
            if events and size > MESSAGE_BYTES:
                break
            events.append(aged)
            self._events.popleft()
        lost, self._lost = self._lost, 0
        return Noted(events=events, lost=lost)


class Copies:
    """Tells each of those that copy a journal what it does not have."""

    def __init__(self, log: RecordLog, tell: Callable[[str, Journaled], None]) -> None:
        """`tell` hands a message to a copy, in order."""
        self._log = log
        self._tell = tell
        self._told: dict[str, tuple[int, int]] = {}

    def update(self, copies: dict[str, int]) -> None:
        """`copies` are those that there are, each with a number of its process. A new process has nothing."""
        self._told = {name: told for name, told in self._told.items() if copies.get(name) == told[0]}
        for name, serial in copies.items():
            place = self._told.get(name, (serial, 0))[1]
            while place < self._log.total:
                records = self._log.since(place, 200)
                self._tell(name, Journaled(records))
                place = max(place, self._log.first) + len(records)
            self._told[name] = serial, place
