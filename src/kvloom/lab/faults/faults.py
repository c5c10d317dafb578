"""The faults that a run may have, all of them drawn before the run begins."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvloom.lab.sim.fleet import ReschedulingSettings
from kvloom.lab.sim.nodes import SimulatedNode
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.router.candidates import FAILURES
from kvloom.router.quarantine import DEATHS_AFTER
from kvloom.types.request import StartGenerate
from kvloom.types.spec import Option

VOCAB: Final = 500  # tokens of every model's vocabulary
LATEST: Final = 6.0  # seconds that anything on a wire may be late
KEEPING: Final = ("pin", "reserve")  # orders that hold something until its lease has run out
STALE: Final = 3.0  # seconds after which the second copy of a call comes at the latest


@dataclass(frozen=True, slots=True)
class Death:
    """An engine is gone with all it knows, or, `gently`, after it has ended what it had; a new one starts
    `down` seconds later under the same name, with an empty pool."""

    at: float
    unit: str
    down: float
    gently: bool


@dataclass(frozen=True, slots=True)
class GatewayLoss:
    """The router is gone with all its calls, and gives nothing back; a new one starts `down` seconds
    later."""

    at: float
    down: float


@dataclass(frozen=True, slots=True)
class SchedulerLoss:
    """The fleet scheduler is gone with what it knows of the last period; a new one starts `down` seconds
    later."""

    at: float
    down: float


@dataclass(frozen=True, slots=True)
class Relocation:
    """Somebody orders a request to another unit, `unit` or one of those after it: of the requests that have
    had a token and are not over, the one that has this part of them before it."""

    at: float
    which: float
    unit: str


@dataclass(frozen=True, slots=True)
class Switch:
    """The router runs requests under another program from now on."""

    at: float
    program: str
    options: Mapping[str, Option]


@dataclass(frozen=True, slots=True)
class Order:
    """Somebody calls a unit beside the router: keeps a prefix for `seconds`, drops one, asks for room and
    never comes back, or takes the unit out of service for that time."""

    at: float
    unit: str
    what: Literal["pin", "evict", "reserve", "drain"]
    model: str
    prompt: list[int]
    seconds: int


@dataclass(frozen=True, slots=True)
class RollingRestart:
    """Every unit gets a new process, at most `budget` of them at once."""

    at: float
    seconds: float | None
    """The seconds for which what runs at a unit is waited for; None for as long as it takes."""
    budget: int


@dataclass(frozen=True, slots=True)
class Replan:
    """A unit gets another specification: models are added or removed, or its pool is of another size."""

    at: float
    unit: SimulatedUnit
    seconds: float | None
    """The seconds for which what runs at the unit is waited for; None for as long as it takes."""


@dataclass(frozen=True, slots=True)
class UnitAdded:
    """The fleet gets one unit more."""

    at: float
    unit: SimulatedUnit


@dataclass(frozen=True, slots=True)
class UnitRemoved:
    """The fleet loses a unit for good."""

    at: float
    unit: str
    seconds: float | None
    """The seconds for which what runs at the unit is waited for; None for as long as it takes."""


@dataclass(frozen=True, slots=True)
class NodeOutage:
    """Nodes, one or a whole rack, are cut off, or have no power, and so lose all that runs there; `seconds`
    later they are back."""

    at: float
    nodes: tuple[str, ...]
    seconds: float
    off: bool
    """Tells whether they have no power."""


@dataclass(frozen=True, slots=True)
class ControllerLoss:
    """The controller is gone with what it knows; another one starts `down` seconds later with the
    specification that the first one has kept."""

    at: float
    down: float


FleetEdit = RollingRestart | Replan | UnitAdded | UnitRemoved
"""Faults that are edits of the fleet's specification."""

Fault = (
    Death
    | GatewayLoss
    | SchedulerLoss
    | ControllerLoss
    | NodeOutage
    | Relocation
    | Switch
    | Order
    | FleetEdit
)


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody who asks for `body` at `at`."""

    at: float
    body: StartGenerate
    leaves: float | None = None
    """Seconds until the client hangs up."""
    aborts: float | None = None
    """Seconds until the client ends the request, or one choice of it, and reads on."""
    choice: int | None = None
    """The choice that is aborted; None for all."""
    pause: float = 0.0
    """Seconds that the client takes over each frame."""
    stop: str = ""
    """A stop string: a choice is aborted once its text, by `text_of`, holds it. It is empty if there is
    none."""


def text_of(tokens: Iterable[int]) -> str:
    """Returns the text that stop strings are looked for in: one of four letters a token."""
    return "".join("abcd"[token % 4] for token in tokens)


@dataclass(frozen=True, slots=True)
class CallFault:
    """The fate of one call."""

    late: float = 0.0
    """The seconds by which the call is late on the way there."""
    slow: float = 0.0
    """The seconds by which the answer is late on the way back."""
    lost: bool = False
    """Tells whether the call never arrives."""
    unanswered: bool = False
    """Tells whether the answer never arrives."""
    again: float | None = None
    """The seconds after which the call arrives a second time; None if it does not."""
    cut: int | None = None
    """The number of frames after which the stream breaks; None if it does not."""
    noticed: float = 0.0
    """The seconds until a side sees that the other is gone."""

    def __str__(self) -> str:
        told = {"late": self.late, "slow": self.slow, "again": self.again, "cut after": self.cut}
        parts = [f"{name} {value:g}" for name, value in told.items() if value]
        return ", ".join([*parts, *["lost"] * self.lost, *["unanswered"] * self.unanswered])


@dataclass(frozen=True, slots=True)
class Rates:
    """The parts of the calls, and of the jobs, that have each fault."""

    late: float = 0.0
    slow: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    again: float = 0.0
    cut: float = 0.0
    jobs: float = 0.0

    @property
    def none(self) -> bool:
        return self == Rates()


NOTHING: Final = CallFault()


class FaultSource:
    """Yields faults one after the other, as the seed has it, until it is calmed."""

    def __init__(self, seed: str, rates: Rates) -> None:
        self._random = random.Random(seed)
        self._rates = rates

    def calm(self) -> None:
        self._rates = Rates()

    def next(self) -> CallFault:
        rates, draw = self._rates, self._random
        if rates.none:
            return NOTHING
        hit = {
            name: draw.random() < getattr(rates, name)
            for name in ("late", "slow", "lost", "unanswered", "again", "cut")
        }
        return CallFault(
            late=_moment(draw, LATEST) if hit["late"] else 0.0,
            slow=_moment(draw, LATEST) if hit["slow"] else 0.0,
            lost=hit["lost"],
            unanswered=hit["unanswered"],
            again=_moment(draw, STALE) if hit["again"] else None,
            cut=draw.randint(0, 6) if hit["cut"] else None,
            noticed=_moment(draw, LATEST),
        )

    def fails(self) -> bool:
        """Returns whether the next job fails."""
        return self._rates.jobs > 0 and self._random.random() < self._rates.jobs


def _moment(draw: random.Random, most: float) -> float:
    """Returns seconds that are mostly few, and now and then as many as can be."""
    return most * float(draw.random() ** 4)


@dataclass(frozen=True, slots=True)
class FaultScenario:
    """The scenario of one run: who serves, who asks, and what goes wrong."""

    seed: int
    units: tuple[SimulatedUnit, ...]
    contexts: Mapping[str, int]
    """The context of each model in tokens, by model."""
    program: Switch
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...] = ()
    rates: Rates = field(default_factory=Rates)
    """The rates of faults of the calls to the engines, and of jobs."""
    fleet_rates: Rates | None = None
    """The rates of faults of the fleet scheduler's calls, if they are others."""
    delay: float = 0.0003
    """The seconds that the wire takes one way."""
    rescheduling: ReschedulingSettings | None = None
    """The settings of the fleet scheduler; None if there is none."""
    nodes: tuple[SimulatedNode, ...] = ()
    """The machines of the units; empty if all are on one."""
    node_lease: float = 1.0
    """The seconds for which a machine's units serve while it is cut off."""

    @property
    def all_units(self) -> tuple[SimulatedUnit, ...]:
        """Returns the units with each specification that one of them ever has."""
        later = [fault.unit for fault in self.faults if isinstance(fault, Replan | UnitAdded)]
        return (*self.units, *later)

    def _ends_nodes(self, fault: Fault) -> bool:
        """Returns whether a fault ends the engines of nodes, because they have no power or no lease."""
        match fault:
            case NodeOutage(seconds=seconds, off=off):
                return off or seconds >= self.node_lease
            case ControllerLoss(down=down):
                return bool(self.nodes) and down >= self.node_lease
            case _:
                return False

    @property
    def tidy(self) -> bool:
        """Tells whether everybody gives back what was held for a request, so that leases are not needed."""
        return self.rates.none and not any(
            isinstance(one, Death | GatewayLoss | NodeOutage)
            or self._ends_nodes(one)
            or (isinstance(one, Order) and one.what in KEEPING)
            or (isinstance(one, RollingRestart | Replan | UnitRemoved) and one.seconds is not None)
            for one in self.faults
        )

    @property
    def harmless(self) -> bool:
        """Tells whether nothing breaks, no unit is taken out of service, and no model is removed: whoever
        stays is answered."""
        return self.survivable and not any(
            isinstance(one, Death | Replan | UnitRemoved) for one in self.faults
        )

    @property
    def survivable(self) -> bool:
        """Tells whether at most engines die, and so few that none can be thought to die of a request: who has
        begun to be answered is answered whole. A request whose model or unit is removed has nowhere else to
        go, so what runs must be waited for, and no engine may die meanwhile."""
        deaths = sum(isinstance(one, Death) for one in self.faults)
        taken = [one for one in self.faults if isinstance(one, Replan | UnitRemoved)]
        return (
            self.rates.none
            and deaths <= FAILURES
            and deaths < DEATHS_AFTER
            and (not taken or (not deaths and all(one.seconds is None for one in taken)))
            and not any(
                isinstance(one, GatewayLoss)
                or self._ends_nodes(one)
                or (isinstance(one, Order) and one.what == "drain")
                for one in self.faults
            )
        )
