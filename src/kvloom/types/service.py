"""The states and orders of units and nodes, as those who run a fleet see and give them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvloom.types.load import UnitLoad
from kvloom.types.spec import EngineSpec, Option, ProgramSpec

LONGEST_DRAIN: Final = 3600  # seconds
PATIENCE: Final = 120.0  # seconds for which a request waits for who is about to serve it, if nobody says

Service = Literal["up", "down", "draining", "drained", "restarting", "starting", "away"]
NodeService = Literal["there", "draining", "drained", "silent", "lost", "gone"]
NO_PROCESS: Final[tuple[Service, ...]] = ("down", "restarting", "starting", "away")  # or none that answers
IN_SERVICE: Final[tuple[Service, ...]] = ("up", "down")  # others give away what they have


class UnitState(Struct, frozen=True, kw_only=True):
    """One unit as the gateway sees it."""

    name: str
    state: Service
    """`up`: it takes requests. `down`: it does not answer. `draining`: it takes none and still works on some.
    `drained`: it works on none. `restarting`: it is about to be a new process. `away`: it has no process,
    because it was stopped, is not needed, or failed to start. `starting`: it is about to have one."""
    calls: int
    """The number of calls that the router has in flight there."""
    models: tuple[str, ...]
    """The models that it serves, or is to serve once it has a process."""
    problem: str = ""
    """The reason why it is down."""


class NodeState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node as those who run a fleet see it."""

    name: str
    state: NodeService
    """`there`: units start on it. `draining`: none does, and something still runs there. `drained`: nothing
    runs there. `silent`: it does not answer, and what runs there may serve until its lease is over. `lost`:
    its lease is over, or it is known that nothing runs there any more. `gone`: it has left by itself."""
    address: str = ""
    cores: int = 0
    memory: int = 0
    """The bytes that units may take there."""
    left: int = 0
    """The bytes of these that no unit takes."""
    gpus: int = 0
    components: tuple[str, ...] = ()
    """The components that have a process there."""
    problem: str = ""
    """The reason why it does not answer; or the units that were there, and why they have no other node
    yet."""


class Drain(Struct, frozen=True, kw_only=True):
    """The body of drain and restart, of units and nodes. `seconds` tells how long to wait for what runs
    there; if it is left out, the config's `drain` does."""

    seconds: Annotated[float, Meta(ge=0, le=LONGEST_DRAIN)] | None = None


class Admit(Struct, frozen=True):
    """The body of admit, which is empty."""


class LoadLora(Struct, frozen=True, kw_only=True):
    """The body of load_lora_adapter, as vLLM has it."""

    lora_name: str = ""
    lora_path: str = ""
    """The adapter's folder on the hosts of the units, from the root on."""
    base_model_name: str | None = None
    """The model of which it is an adapter. It may be left out if the fleet has one model."""
    load_inplace: bool = False
    """Tells whether it may take the place of an adapter of that name, which is not served."""


class UnloadLora(Struct, frozen=True, kw_only=True):
    """The body of unload_lora_adapter, as vLLM has it."""

    lora_name: str = ""


class RestartStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a rolling restart: a component begins to restart, has done so in `seconds`, or has failed to
    because of `problem`, with which the whole restart ends."""

    component: str
    state: Literal["restarting", "restarted", "failed"]
    seconds: float | None = None
    problem: str = ""


class RevertedProgram(Struct, frozen=True):
    """A program from which the fleet has gone back to the one before."""

    program: ProgramSpec | None
    """The program; None for the config's."""
    problem: str
    """The fate of the gateway that ran it."""


class ProgramState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The router program that runs, and how it stands."""

    name: str
    options: dict[str, Option]
    probation: bool = False
    """Tells whether it was set less than a minute ago: if the gateway dies or hangs, the one before runs
    again."""
    reverted: RevertedProgram | None = None
    """The program that was set last, if it did not pass its probation."""


class Scale(Struct, frozen=True):
    """The number of replicas of a model, and the bounds at which it changes. Raises ValueError if bounds are
    the wrong way round."""

    least: int
    """The smallest number of replicas."""
    most: int
    """The largest number of replicas."""
    low: float = 160.0
    """The mean freeness, in decode steps, below which there is to be one replica more."""
    high: float = 960.0
    """The mean freeness, in decode steps, above which there is to be one replica less."""
    seconds: float = 10.0
    """The seconds for which freeness must be outside of `low` and `high` before the number changes."""
    idle: float = 60.0
    """Seconds without a request before the last replica goes, if `least` is 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or not self.most:
            raise ValueError(f"{self.least} to {self.most} replicas; 0 ≤ least ≤ most and 1 ≤ most are right")
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} and high {self.high:g}; low < high is right")
        if not self.seconds >= 0 or not self.idle >= 0:
            raise ValueError(f"seconds {self.seconds:g} and idle {self.idle:g}; 0 or more is right")


class GroupSpec(Struct, frozen=True):
    """Units that are replicas of one another, in the order in which they are started."""

    units: tuple[str, ...]
    scale: Scale


class UnitGroup(Struct, frozen=True):
    """The units of a `GroupSpec` as they are now."""

    units: frozenset[str]
    scale: Scale
    starting: int = 0
    """The number of units that are about to have a process."""
    away: tuple[str, ...] = ()
    """The units that can be given a process now, in this order. Units that were to lose theirs, and still
    have it, come first."""
    models: frozenset[str] = frozenset()
    """The models that each unit serves."""
    idle: float = 0.0
    """The seconds since the last request ended there."""


class Steps(Struct, frozen=True):
    """The units that are to have a process, and those that are to lose theirs once nothing runs there."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class Pair(Struct, frozen=True, order=True):
    """Two units: requests are to move from `source` to `destination`."""

    source: str
    destination: str


class Pairs(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The pairs that stand for `seconds` from now, unless others come. No other pairs stand beside them."""

    pairs: tuple[Pair, ...]
    seconds: Annotated[float, Meta(gt=0)]
    floor: float = 0.0
    """The freeness, in decode steps, that a destination keeps: a request that would leave it less does not
    move there."""
    freeness: dict[str, float | None] = {}
    """The freeness of the pairs' units, from which the pairs were made; None for one that is infinite: that
    of a source that drains, or of a destination on which nothing runs. It is empty if somebody else has made
    the pairs."""


class FleetState(Struct, frozen=True, kw_only=True):
    """The state that the fleet scheduler decides by."""

    loads: dict[str, UnitLoad]
    """The loads of the units that answer, by name. A unit that takes no requests drains."""
    waiting: dict[str, int] = {}
    """The number of requests that nobody can answer yet, by model."""
    groups: dict[str, UnitGroup] = {}
    """The groups of units that come and go."""


class Placement(Struct, frozen=True, kw_only=True):
    """The units of a fleet and the machine that it runs on."""

    units: tuple[EngineSpec, ...]
    """The units that have a process."""
    away: tuple[EngineSpec, ...]
    """The units that have no process now."""
    scaled: tuple[str, ...]
    """The names of the units that come and go by themselves."""
    memory: int
    """The bytes that were free before the fleet was started."""
    cores: int
    """The number of cores that the fleet may use."""
