"""What the supervisor and a process it started say to each other, a line of JSON each.

Orders go down the child's stdin, which then stays open as long as the supervisor lives. Reports come up a
pipe of their own. Neither is seen by other users of the machine, as arguments would be.
"""

from __future__ import annotations

from msgspec import Struct

from kvloom.types.service import PATIENCE, GroupSpec
from kvloom.types.spec import EngineSpec, ProgramSpec, SchedulerSpec


class EngineOrder(Struct, frozen=True, kw_only=True):
    """socket: path where to serve the verbs. secret: what callers must know."""

    spec: EngineSpec
    socket: str
    secret: str


class Standing(Struct, frozen=True, kw_only=True, tag="standing"):
    """What a gateway was told while it served, kept for its successor. program: None for the config's.
    drained: units that are to get no requests; leaving: those that are to lose their process once they are
    empty, and the seconds that they are given for that, by each gateway anew."""

    program: ProgramSpec | None = None
    drained: frozenset[str] = frozenset()
    leaving: dict[str, float | None] = {}


class GatewayOrder(Struct, frozen=True, kw_only=True):
    """Be ready to serve, and wait for `Begin`; then units that were to restart are told of. engines: unit →
    URL, of all that may be; specs: the same; away: those that have no process. groups: units that come and go
    by themselves. memory, cores: of the machine, before the fleet began. listener: descriptor of the
    listening socket, inherited. drain: seconds for which requests at a unit that is to restart are waited
    for. patience: those for which a request waits for a restart. program: the config's. beside: the
    components that are no units, in the order in which they are restarted. folder: where a program is looked
    for, if it is one of the user's. sockets: where the engines' sockets are."""

    engines: dict[str, str]
    secret: str
    listener: int
    api_keys: dict[str, int | None]
    max_body: int
    program: ProgramSpec
    folder: str
    sockets: str
    admin_keys: frozenset[str] = frozenset()
    specs: tuple[EngineSpec, ...] = ()
    away: frozenset[str] = frozenset()
    groups: dict[str, GroupSpec] = {}
    memory: int = 0
    cores: int = 0
    beside: tuple[str, ...] = ()
    drain: float = 60.0
    patience: float = PATIENCE
    standing: Standing = Standing()


class SchedulerOrder(Struct, frozen=True, kw_only=True):
    """gateway: its URL. secret: what it must be told. folder: of the engines' sockets."""

    spec: SchedulerSpec
    gateway: str
    secret: str
    folder: str


class Begin(Struct, frozen=True):
    """Serve from now on."""


class Restarted(Struct, frozen=True, tag="restarted"):
    """The component's new process, or its first, answers, or has died, of `problem`. A new one of a unit or
    of the scheduler is tried again."""

    component: str
    problem: str | None = None


class Stopped(Struct, frozen=True, tag="stopped"):
    """The unit has no process any more."""

    unit: str


class Away(Struct, frozen=True, tag="away"):
    """To a gateway that has begun: these units have no process, and all others have, whatever changed since
    its order was written."""

    units: frozenset[str]


class Back(Struct, frozen=True, tag="back"):
    """The unit had died, and another process of it answers."""

    unit: str


class Retire(Struct, frozen=True, tag="retire"):
    """To a gateway: another one serves in its place. End with the last of the requests that are there."""


class Progress(Struct, frozen=True, tag="progress"):
    """What the process is doing now."""

    text: str


class Ready(Struct, frozen=True, tag="ready"):
    """It answers. chat: the models that have a chat template, where it knows."""

    chat: tuple[str, ...] = ()


class Refused(Struct, frozen=True, tag="refused"):
    """It ends, because what it was given cannot be used."""

    message: str


class Restart(Struct, frozen=True, tag="restart"):
    """A new process is wanted in place of the component's; `Restarted` tells how it went."""

    component: str


class Run(Struct, frozen=True, tag="run"):
    """The unit is to have a process; `Restarted` tells how it went."""

    spec: EngineSpec


class Stop(Struct, frozen=True, tag="stop"):
    """The unit's process is to end; `Stopped` tells that it has."""

    unit: str


class Forget(Struct, frozen=True, tag="forget"):
    """The unit, which has no process, is not to get one any more."""

    unit: str


Asked = Standing | Restart | Run | Stop | Forget
News = Restarted | Stopped | Away | Back | Retire
Order = EngineOrder | GatewayOrder | SchedulerOrder | Begin | News
Report = Progress | Ready | Refused | Asked
