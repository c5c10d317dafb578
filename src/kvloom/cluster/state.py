"""A fleet's specification (`FleetSpec`) tells what the fleet is to be, and its status (`FleetStatus`) what
there is.

The controller owns both. Gateways mirror them, and anybody who wants something else edits the specification.
A unit is a component of its own name, the fleet scheduler is `scheduler`, and a gateway has the
`gateway_name` of its generation and its node, because two of them live while one takes the other's place. All
times are seconds of the controller's clock. A fleet of one host has no nodes; if there are any, each
component's process is on one of them, or on the host of the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from kvloom.types.service import GroupSpec, RestartStep, RevertedProgram
from kvloom.types.spec import EngineSpec, ProgramSpec

SCHEDULER: Final = "scheduler"
GATEWAY: Final = "gateway"

Phase = Literal[
    "absent",  # It has no process, and none is coming.
    "starting",  # It has a process, which does not answer yet.
    "ready",  # Its process answers.
    "draining",  # Its process answers, gets no new requests, and is to end once it has none.
    "retiring",  # A gateway: another one serves in its place, and it ends with its last request.
    "ending",  # Its process was told to end.
    "waiting",  # Its process has died, and another one starts after a pause.
    "failed",  # The first process of its specification died before it answered; no other one is tried,
    # but for a gateway that no other one can stand in for.
]
NEXT: Final[Mapping[Phase, frozenset[Phase]]] = {
    "absent": frozenset({"starting"}),
    "starting": frozenset({"ready", "ending", "waiting", "failed", "absent"}),
    "ready": frozenset({"draining", "retiring", "ending", "waiting", "absent"}),
    "draining": frozenset({"ready", "ending", "absent"}),
    "retiring": frozenset({"ending", "absent"}),
    "ending": frozenset({"absent"}),
    "waiting": frozenset({"starting", "absent"}),
    "failed": frozenset({"starting", "absent"}),
}
"""The legal transitions between phases. A gateway alone goes from `starting` or `ready` to `absent`, if its
node is lost."""

ALIVE: Final[tuple[Phase, ...]] = ("starting", "ready", "draining", "retiring", "ending")
"""The phases in which a component has a process."""

NodePhase = Literal[
    "there",  # Its keeper answers.
    "silent",  # Its keeper does not answer; its processes may serve until its lease is over.
    "lost",  # Its lease is over, or it is known that nothing runs there any more.
    "gone",  # It has left by itself.
]
NODE_NEXT: Final[Mapping[NodePhase, frozenset[NodePhase]]] = {
    "there": frozenset({"silent", "lost", "gone"}),
    "silent": frozenset({"there", "lost", "gone"}),
    "lost": frozenset({"there", "gone"}),
    "gone": frozenset({"there"}),
}
"""The legal transitions between the phases of a node."""


class UnitSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The specification of one unit."""

    engine: EngineSpec
    wanted: bool = True
    """Whether it is to have a process."""
    generation: int = 1
    """A process of another generation is drained and replaced."""
    edition: int = 1
    """The generation in which `engine` was last changed."""
    drained: bool = False
    """Whether it is to get no requests, though it has a process."""
    seconds: float | None = None
    """The seconds for which its running requests are waited for before its process ends; None for as long as
    it takes."""
    removed: bool = False
    """Whether it is to be no unit any more, once it has no process."""
    node: str = ""
    """The node that its process is to be on; empty for any."""
    changed: dict[str, int] = {}
    """The revision at which each field was changed last."""


class NodeSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The specification of one node."""

    drained: bool = False
    """Whether no process is to be there."""
    seconds: float | None = None
    """The seconds for which a unit's running requests are waited for before the unit moves; None for as long
    as it takes."""
    changed: dict[str, int] = {}
    """The revision at which each field was changed last."""


class Rolling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A restart of the whole fleet, component after component."""

    left: tuple[str, ...]
    """Components whose turn is still to come, in this order."""
    active: tuple[str, ...] = ()
    """Components that are being restarted now."""
    seconds: float | None = None
    """The seconds for which a unit's running requests are waited for; None for as long as it takes."""
    budget: int = 1
    """How many units may be out of service at once for a restart, whoever has asked for it."""


class FleetSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The specification of a fleet."""

    units: dict[str, UnitSpec] = {}
    groups: dict[str, GroupSpec] = {}
    """Units that come and go by themselves, by the name of their group."""
    program: ProgramSpec | None = None
    """The router program; None for the config's."""
    proven: ProgramSpec | None = None
    """The last program that has passed its probation, to which the fleet goes back; None for the config's. If
    it is another one than `program`, that is on probation."""
    reverted: RevertedProgram | None = None
    """The program from which the fleet has gone back, until another one is set."""
    on_nodes: bool = False
    """Whether its processes are on nodes: then no unit starts before a node with room is there."""
    nodes: dict[str, NodeSpec] = {}
    """The nodes that have joined or were edited, but for those that have left or were lost long ago."""
    gateway: int = 1
    """The generation of the gateways that are to serve; 0 if there are none."""
    gateways: tuple[str, ...] = ()
    """The nodes that are to have a gateway each; empty for one gateway, at the controller's host."""
    scheduler: int = 0
    """The generation of the fleet scheduler; 0 if there is to be none."""
    drain: float = 60.0
    """Seconds that a gateway which another one has replaced is given for its requests."""
    rolling: Rolling | None = None
    revision: int = 0
    """Counts the edits."""
    changed: dict[str, int] = {}
    """The revision at which each field that is not a unit's was changed last."""


class ComponentStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of one component."""

    phase: Phase = "absent"
    since: float = 0.0
    """The time at which the phase began."""
    until: float | None = None
    """The time at which the phase is to end at the latest; None if that is open."""
    generation: int = 0
    """The generation of its process, or of the last one that it had."""
    serial: int = 0
    """Counts the processes that the controller has started for it."""
    node: str = ""
    """The node that its process is on, or was on last; empty for the controller's host."""
    device: str = ""
    """The device of that node that a unit was given; empty for the one that it specifies."""
    memory: int = 0
    """Bytes of that node's memory that a unit's process was given."""
    lack: str = ""
    """The room that a unit which is to have a process waits for, because no node has it."""
    pid: int | None = None
    endpoint: str = ""
    routes: dict[str, str] = {}
    """The route under /v1 at which each of its models is asked, if it has answered."""
    calls: int | None = None
    """Calls in flight and reservations held there, over all gateways; None while a gateway has yet to say, or
    is not asked."""
    problem: str = ""
    """The reason why it is not ready, or takes no requests though it is, in one line."""
    failures: int = 0
    """Processes that have died in a row, none of which lived for long."""
    pause: float = 0.0
    """Seconds that were waited before the last start."""
    proven: int = 0
    """The last generation of which a process has answered; 0 once it was stopped."""
    replaces: bool = False
    """Whether its process takes the place of one that was told to end for it."""
    misses: int = 0
    """Looks in a row at which it had given no sign of life."""
    killed: bool = False
    """Whether its process was killed, and has yet to end."""
    begun: bool = False
    """Of a gateway: whether it was told what the fleet is, and so may serve."""
    seen: bool = False
    """Of a unit: whether a gateway has asked its present process what it serves."""


class NodeStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of one node."""

    phase: NodePhase = "there"
    since: float = 0.0
    """The time at which the phase began."""
    address: str = ""
    cores: int = 0
    memory: int = 0
    """Bytes that its units may take."""
    gpus: int = 0
    problem: str = ""
    """Why its keeper does not answer, in one line."""
    lease: float | None = None
    """The time at which a silent node's lease is over: from then on none of its processes answers."""
    told: bool = True
    """Whether it has told this controller what runs there."""
    stale: tuple[str, ...] = ()
    """Components of which it has a process that is not wanted there, and was told to end."""


class FleetStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of a fleet."""

    processes: dict[str, ComponentStatus] = {}
    nodes: dict[str, NodeStatus] = {}
    steps: list[RestartStep] = []
    """The steps that the last rolling restart has done so far."""
    opened: bool = False
    """Whether a gateway was ever told to serve: then none waits any more for units that start."""
    probation: float | None = None
    """When the program's probation began; None if it is on none. Changes do not tell it to gateways."""

    def copy(self) -> FleetStatus:
        """Returns a status that later changes of this one leave as it is."""
        return replace(self, processes=dict(self.processes), nodes=dict(self.nodes), steps=self.steps[:])


ABSENT: Final = ComponentStatus()

Outlook = Literal[
    "here",  # It has a process of the generation that is wanted, which answers.
    "restarting",  # It is about to have another process in place of one that was told to end for it.
    "starting",  # It is about to have a process, and had none.
    "down",  # Its process has died, and another one is to come.
    "leaving",  # It is to lose its process once nothing runs there.
    "away",  # It has no process.
    "failed",  # It cannot be started as it is specified.
]


def is_counted(unit: UnitSpec | None, process: ComponentStatus) -> bool:
    """Returns whether gateways tell how many requests they have at the unit, because it gets no new ones."""
    return process.phase == "draining" or (unit is not None and unit.drained)


def outlook(unit: UnitSpec | None, process: ComponentStatus) -> Outlook:  # noqa: PLR0911 - a table
    """Returns how a unit stands, for its callers. unit: None if it is to be removed."""
    wanted = unit is not None and unit.wanted
    behind = unit is not None and process.generation != unit.generation
    match process.phase:
        case "ready" | "draining" | "retiring" | "ending" if not wanted:
            return "leaving"
        case "ready" if not behind:
            return "here"
        case "ready" | "draining" | "retiring":
            return "restarting"
        case "ending" if process.failures:
            return "down"
        case "ending":
            return "restarting"
        case "failed" if not behind:
            return "failed"
        case _ if not wanted:
            return "away"
        case "waiting":
            return "down"
        case "starting" if process.failures:
            return "down"
        case "absent" | "starting" if process.replaces:
            return "restarting"
        case _:
            return "starting"


def gateway_name(generation: int, node: str = "") -> str:
    return f"{GATEWAY}/{generation}@{node}" if node else f"{GATEWAY}/{generation}"


def is_gateway(component: str) -> bool:
    """Returns whether the component is a gateway. Unit names hold no slash."""
    return component.startswith(f"{GATEWAY}/")


def gateway_node(component: str) -> str:
    """Returns the node of a gateway by its name; empty for one at the controller's host."""
    return component.partition("@")[2]


def program_name(program: ProgramSpec | None) -> str:
    """Returns what people call a fleet's program."""
    return "the config's" if program is None else program.name


def is_drained(node: str, spec: FleetSpec) -> bool:
    return node in spec.nodes and spec.nodes[node].drained


def generation_of(component: str, spec: FleetSpec) -> int:
    """Returns the generation that a component is to have; 0 if there is to be none of it."""
    if is_gateway(component):
        return int(component.partition("/")[2].partition("@")[0])
    if component == SCHEDULER:
        return spec.scheduler
    unit = spec.units.get(component)
    return unit.generation if unit is not None and unit.wanted else 0
