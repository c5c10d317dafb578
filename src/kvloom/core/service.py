"""Whether units take requests, as those who run a fleet see and order it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

LONGEST_DRAIN: Final = 3600  # seconds
PATIENCE: Final = 120.0  # seconds for which a request waits for who is about to serve it, if nobody says

Service = Literal["up", "down", "draining", "drained", "restarting", "starting", "away"]
NO_PROCESS: Final[tuple[Service, ...]] = ("down", "restarting", "starting", "away")  # or none that answers
IN_SERVICE: Final[tuple[Service, ...]] = ("up", "down")  # others give away what they have


class UnitState(Struct, frozen=True, kw_only=True):
    """state: up, it takes requests; down, it does not answer; draining, it takes none and still works on
    some; drained, it works on none; restarting, it is about to be a new process; away, it has no process, and
    gets one where it is needed; starting, it is about to. calls: those that the router has in flight there.
    models: those it serves, or is to serve once it has a process. problem: why it is down."""

    name: str
    state: Service
    calls: int
    models: tuple[str, ...]
    problem: str = ""


class Drain(Struct, frozen=True, kw_only=True):
    """Body of drain and restart. seconds: how long what runs there is waited for, the config's `drain` where
    it is left out."""

    seconds: Annotated[float, Meta(ge=0, le=LONGEST_DRAIN)] | None = None


class Admit(Struct, frozen=True):
    """Body of admit, which has nothing to say."""


class RestartStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of a rolling restart: a component begins to restart, has done so in `seconds`, or has failed to, of
    `problem`, with which the whole ends."""

    component: str
    state: Literal["restarting", "restarted", "failed"]
    seconds: float | None = None
    problem: str = ""
