"""The events of a fleet, each with its reason in words and the numbers that decided. They hold names of
models, units and requests, and nothing of prompts or answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct

MOST_WORDS: Final = 240
"""The most characters of a reason. A longer one is cut."""


class Moved(Struct, frozen=True, kw_only=True, tag_field="type", tag="moved"):
    """A request goes on at another unit."""

    request: str
    model: str
    source: str
    destination: str
    reason: str


class Stayed(Struct, frozen=True, kw_only=True, tag_field="type", tag="stayed"):
    """A request was to move, and could not."""

    request: str
    model: str
    source: str
    destination: str
    reason: str


class Preempted(Struct, frozen=True, kw_only=True, tag_field="type", tag="preempted"):
    """A sequence has lost its blocks. It waits, and is computed again."""

    model: str
    request: str
    reason: str


class Woken(Struct, frozen=True, kw_only=True, tag_field="type", tag="woken"):
    """A model's weights begin to be read."""

    model: str
    reason: str


class Awake(Struct, frozen=True, kw_only=True, tag_field="type", tag="awake"):
    """A model's weights are in memory as a whole."""

    model: str
    seconds: float
    """The seconds that it took to read them."""


class Slept(Struct, frozen=True, kw_only=True, tag_field="type", tag="slept"):
    """A model's weights are in memory no more."""

    model: str
    reason: str


class AdapterIn(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter_in"):
    """An adapter's weights are in memory."""

    model: str
    """The adapter's name."""
    base: str
    reason: str


class AdapterOut(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter_out"):
    """An adapter's weights are in memory no more."""

    model: str
    base: str
    reason: str


class Lent(Struct, frozen=True, kw_only=True, tag_field="type", tag="lent"):
    """A unit lends blocks to a model of another one."""

    model: str
    """The model of the unit that borrows."""
    blocks: int
    reason: str


class Returned(Struct, frozen=True, kw_only=True, tag_field="type", tag="returned"):
    """The blocks that a unit has lent are its own again."""

    model: str
    blocks: int
    reason: str


class Quarantined(Struct, frozen=True, kw_only=True, tag_field="type", tag="quarantined"):
    """A request is tried no more, because engines have died of it."""

    request: str
    model: str
    reason: str


class Starting(Struct, frozen=True, kw_only=True, tag_field="type", tag="starting"):
    """A component gets a process."""

    reason: str
    models: tuple[str, ...] = ()
    """The models that it is to serve."""
    node: str = ""


class Ready(Struct, frozen=True, kw_only=True, tag_field="type", tag="ready"):
    """A component's process answers."""

    reason: str
    seconds: float
    """The seconds that it took to start."""
    models: tuple[str, ...] = ()
    """The models that it has loaded."""


class Draining(Struct, frozen=True, kw_only=True, tag_field="type", tag="draining"):
    """A component gets no new requests."""

    reason: str


class Admitted(Struct, frozen=True, kw_only=True, tag_field="type", tag="admitted"):
    """A component that drained gets requests again."""

    reason: str


class Killed(Struct, frozen=True, kw_only=True, tag_field="type", tag="killed"):
    """A component's process is killed."""

    reason: str


class Died(Struct, frozen=True, kw_only=True, tag_field="type", tag="died"):
    """A component's process is gone, and nobody has ordered it."""

    reason: str
    again: float | None
    """The seconds until another one is tried; None if none is."""


class Ended(Struct, frozen=True, kw_only=True, tag_field="type", tag="ended"):
    """A component's process has ended, as was ordered."""

    reason: str
    models: tuple[str, ...] = ()
    """The models that it had."""


class Added(Struct, frozen=True, kw_only=True, tag_field="type", tag="added"):
    """The fleet is to have another unit, or a unit other models."""

    reason: str
    models: tuple[str, ...]


class Removed(Struct, frozen=True, kw_only=True, tag_field="type", tag="removed"):
    """The fleet is to have a unit no more."""

    reason: str
    models: tuple[str, ...]


class ProgramSet(Struct, frozen=True, kw_only=True, tag_field="type", tag="program"):
    """Another router program runs."""

    name: str
    reason: str


class HostChanged(Struct, frozen=True, kw_only=True, tag_field="type", tag="host"):
    """A host of the fleet is in another state."""

    state: str
    """A phase of `NodeStatus` (`cluster/state.py`)."""
    reason: str


class Fault(Struct, frozen=True, kw_only=True, tag_field="type", tag="fault"):
    """Something is made to go wrong, or ordered, in a run with faults (`kvloom chaos`)."""

    kind: str
    reason: str
    seconds: float | None = None
    """The seconds for which it lasts; None if it is over at once, or lasts as long as it takes."""


class Lost(Struct, frozen=True, kw_only=True, tag_field="type", tag="lost"):
    """Events of a component have not reached the journal."""

    count: int
    reason: str


Event = (
    Moved
    | Stayed
    | Preempted
    | Woken
    | Awake
    | Slept
    | AdapterIn
    | AdapterOut
    | Lent
    | Returned
    | Quarantined
    | Starting
    | Ready
    | Draining
    | Admitted
    | Killed
    | Died
    | Ended
    | Added
    | Removed
    | ProgramSet
    | HostChanged
    | Fault
    | Lost
)


class Record(Struct, frozen=True, kw_only=True):
    """An event, as the journal keeps it."""

    journal: int
    """The second of Unix time at which its journal began; 0 in virtual time."""
    number: int
    """Its place in the journal, from 1 on."""
    at: float
    """The time when it happened, in seconds of Unix time, or of virtual time."""
    component: str
    """The name of that to which it has happened: a unit, a gateway, the fleet scheduler, a host, or
    `fleet`."""
    event: Event

    @property
    def id(self) -> str:
        return f"{self.journal}-{self.number}"


class Aged(Struct, frozen=True, array_like=True):
    """An event on its way to the journal."""

    age: float
    """The seconds since it happened. Clocks of hosts differ, but not in that."""
    event: Event


class Noted(Struct, frozen=True, kw_only=True, tag="noted", omit_defaults=True):
    """A process tells what has happened in it."""

    events: list[Aged]
    lost: int = 0
    """The number of events before them that found no room."""


class Journaled(Struct, frozen=True, tag="journaled"):
    """A gateway is told what the journal has new."""

    records: list[Record]


Recorder = Callable[[Event], None]
"""Takes an event. It neither blocks nor raises."""


def nobody(event: Event) -> None:
    """Satisfies `Recorder` if no journal is kept."""


def short(words: str) -> str:
    """Returns a reason on one line, of a bounded length."""
    line = " ".join(words.split())
    return line if len(line) <= MOST_WORDS else line[: MOST_WORDS - 1] + "…"
