"""Decides what is to be done next, so that a fleet's status becomes what its specification says.

`reconcile` is a pure function: it has no clock and does nothing. The controller carries its actions out, in
their order, and asks again after each change, and when the time of a `Wait` has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Final

from kvloom.cluster.actions import (
    Action,
    BeginServing,
    DrainUnit,
    EndTurn,
    Forget,
    ForgetNode,
    Kill,
    LoseNode,
    MoveUnit,
    PassOver,
    ProveProgram,
    RaiseGeneration,
    ReadmitUnit,
    RetireGateway,
    RevertProgram,
    StartProcess,
    StopProcess,
    TellLack,
    Wait,
)
from kvloom.cluster.placement import Moves, gateway_nodes, placed
from kvloom.cluster.state import (
    ABSENT,
    ALIVE,
    GATEWAY,
    SCHEDULER,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    UnitSpec,
    gateway_name,
    gateway_node,
    generation_of,
    is_gateway,
    outlook,
)


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds that a controller waits for processes."""

    first: float = 0.5
    """The pause before the first start after a death; it doubles with each death in a row."""
    most: float = 30.0
    """The longest pause."""
    healthy: float = 60.0
    """After a life of so long the next pause is `first` again."""
    check: float = 10.0
    """The time between two looks at a process, which must have given a sign of life since the last one."""
    misses: int = 3
    """A process that has given none at so many looks in a row hangs, and is killed."""
    probation: float = 60.0
    """A program that is set while serving is on probation for so long. If the gateway dies or hangs
    meanwhile, the one before runs again."""
    stop: float = 4.0
    """A process is given so long to end by itself once it was told to."""
    load: float = 1800.0
    """A unit's process is given so long to load its models, and to answer."""
    start: float = 60.0
    """So long is given to a fleet scheduler to answer, and to a gateway that takes the place of another one,
    or of one that has died."""
    margin: float = 5.0
    """A gateway that has been replaced is killed so long after its time to drain is over."""
    lease: float = 15.0
    """The processes of a node may serve for so long after its keeper was last answered. A controller that
    starts anew waits so long for the nodes that it has yet to hear of."""
    forget: float = 3600.0
    """A node that was lost or has left is shown for so long."""

    def pause(self, last: float, lived: float) -> float:
        """Returns the pause before the next start. last: the pause before the process that has ended, 0 if
        there was none; lived: the seconds from that process's first answer to its end."""
        return self.first if lived >= self.healthy else min(max(self.first, 2 * last), self.most)


TIMING: Final = Timing()


def reconcile(
    spec: FleetSpec, status: FleetStatus, now: float, timing: Timing = TIMING
) -> tuple[Action, ...]:
    """Returns what is due at `now`: at most one action for each component, and at last at most one `Wait`."""
    found = list(placed(_all(spec, status, now, timing), spec, status))
    if not status.opened and _starts_units(found, spec):
        # A gateway that would have served without these units waits for them.
        found = [action for action in found if not isinstance(action, BeginServing)]
    actions = [action for action in found if not isinstance(action, Wait)]
    waits = [action.until for action in found if isinstance(action, Wait)]
    return (*actions, Wait(min(waits))) if waits else tuple(actions)


def _starts_units(found: list[Action], spec: FleetSpec) -> bool:
    return any(isinstance(action, StartProcess) and action.component in spec.units for action in found)


def _all(spec: FleetSpec, status: FleetStatus, now: float, timing: Timing) -> Iterator[Action]:
    silent = {name for name, node in status.nodes.items() if node.phase == "silent"}
    yield from _units(spec, status, silent, now, timing)
    yield from _others(spec, status, silent, now, timing)
    if spec.rolling is not None:
        yield from _roll(spec, status)
    yield from _nodes(status, now, timing)


def _units(
    spec: FleetSpec, status: FleetStatus, silent: Set[str], now: float, timing: Timing
) -> Iterator[Action]:
    """Yields the actions for the units that are specified. silent: nodes whose processes are left alone."""
    processes, moving = status.processes, Moves(spec, status)
    for name, unit in spec.units.items():
        process = processes.get(name, ABSENT)
        # Nearly all units are settled, nearly always, and nothing can be due for them.
        settled = process.phase == "ready" and process.generation == unit.generation and unit.wanted
        if settled and not process.misses and process.node not in moving.drained:
            continue
        if process.node in silent and process.phase in ALIVE:
            continue  # Its process may serve until the node is lost, and nobody can tell it anything.
        if moving.is_due(unit, process):
            yield MoveUnit(name)
        else:
            yield from _unit(name, unit, process, now, timing)


def _others(
    spec: FleetSpec, status: FleetStatus, silent: Set[str], now: float, timing: Timing
) -> Iterator[Action]:
    """Yields the actions for all other components."""
    gateways, processes = {}, status.processes
    for name, process in processes.items():
        if process.node in silent and process.phase in ALIVE:
            continue
        if is_gateway(name):
            gateways[name] = process
        elif name not in spec.units and name != SCHEDULER:
            yield from _unit(name, None, process, now, timing)
    yield from _scheduler(spec, status, processes.get(SCHEDULER, ABSENT), now, timing)
    if spec.program != spec.proven and status.probation is not None:
        yield from _probation(status.probation, gateways, now, timing)
    if spec.gateway:
        yield from _gateways(spec, status, gateways, now, timing)


def _nodes(status: FleetStatus, now: float, timing: Timing) -> Iterator[Action]:
    """Yields what time makes of nodes: a silent one is lost, and one that is not there is forgotten."""
    for name, node in status.nodes.items():
        if node.phase == "silent" and node.lease is not None:
            yield LoseNode(name) if now >= node.lease else Wait(node.lease)
        elif node.phase in ("lost", "gone"):
            due = node.since + timing.forget
            yield ForgetNode(name) if now >= due else Wait(due)


def _unit(
    name: str, unit: UnitSpec | None, process: ComponentStatus, now: float, timing: Timing
) -> Iterator[Action]:
    """Yields what is due for a unit. unit: None if the specification has it no more."""
    generation = unit.generation if unit is not None and unit.wanted else 0
    match process.phase:
        case "absent" if unit is not None and not generation:
            if unit.removed:
                yield Forget(name)
            elif process.lack:
                yield TellLack(name, "")
        case "ready" if process.generation != generation and not process.killed:
            seconds = unit.seconds if unit is not None else None
            yield DrainUnit(name, None if seconds is None else now + seconds)
        case "draining" if process.generation == generation:
            yield ReadmitUnit(name)
        case "draining" if process.calls == 0:
            yield StopProcess(name)
        case "draining" if (until := _drained_by(unit, process)) is not None:
            yield StopProcess(name) if now >= until else Wait(until)
        case "draining":
            yield from _hangs(name, process, timing)
        case "starting" if process.generation == generation:
            yield from _killed_at(name, process, now, process.since + timing.load)
        case _:
            yield from _process(name, generation, process, now, timing)


def _drained_by(unit: UnitSpec | None, process: ComponentStatus) -> float | None:
    """Returns when a unit that drains is to end at the latest. An edit may have changed it meanwhile."""
    if unit is None or unit.seconds is None:
        return process.until
    return process.since + unit.seconds


def _process(
    name: str, generation: int, process: ComponentStatus, now: float, timing: Timing, *, node: str = ""
) -> Iterator[Action]:
    """Yields the actions that any component needs. generation: the one that is wanted; 0 for none. node: the
    one on which it starts; units are given theirs by `_placed`."""
    behind = process.generation != generation
    match process.phase:
        case "absent":
            yield StartProcess(name, generation, node) if generation else Forget(name)
        case "starting" if behind:
            yield StopProcess(name)
        case "ready":
            yield from _hangs(name, process, timing)
        case "ending":
            yield from _ends(name, process, now)
        case "waiting" | "failed" if not generation:
            yield Forget(name)
        case "waiting" | "failed" if behind:
            yield StartProcess(name, generation, node)
        case "waiting" if process.until is not None:
            yield StartProcess(name, generation, node) if now >= process.until else Wait(process.until)


def _hangs(name: str, process: ComponentStatus, timing: Timing) -> Iterator[Action]:
    if process.misses >= timing.misses and not process.killed:
        yield Kill(name)


def _killed_at(name: str, process: ComponentStatus, now: float, due: float) -> Iterator[Action]:
    """Yields what is due for a process that is killed at `due`, unless it has got on by then."""
    if not process.killed:
        yield Kill(name) if now >= due else Wait(due)


def _ends(name: str, process: ComponentStatus, now: float) -> Iterator[Action]:
    if process.until is not None:
        yield from _killed_at(name, process, now, process.until)


def _scheduler(
    spec: FleetSpec, status: FleetStatus, process: ComponentStatus, now: float, timing: Timing
) -> Iterator[Action]:
    """Yields the actions for the fleet scheduler, which has no requests that would have to end first. It runs
    on the controller's host, once a gateway can be somewhere."""
    generation = spec.scheduler
    if process.phase == "ready" and process.generation != generation:
        yield StopProcess(SCHEDULER)
    elif process.phase == "starting" and process.generation == generation:
        yield from _killed_at(SCHEDULER, process, now, process.since + timing.start)
    elif process.phase in ALIVE or (gateway_nodes(spec, status) if generation else process is not ABSENT):
        yield from _process(SCHEDULER, generation, process, now, timing)


def _probation(
    began: float, gateways: dict[str, ComponentStatus], now: float, timing: Timing
) -> Iterator[Action]:
    """Yields what follows for a program that was set at `began`. A gateway that hangs is known at the first
    look that it misses, and until that look is over none has passed."""
    died = [one for one in gateways.values() if one.phase in ("waiting", "failed") and one.since >= began]
    over = began + timing.probation + timing.check
    if died:
        yield RevertProgram(died[0].problem)
    elif now < over:
        yield Wait(over)
    elif not any(one.misses or one.killed for one in gateways.values()):
        yield ProveProgram()


def _gateways(
    spec: FleetSpec, status: FleetStatus, gateways: dict[str, ComponentStatus], now: float, timing: Timing
) -> Iterator[Action]:
    """Yields the actions for the gateways: each node is seen to by itself."""
    nodes = gateway_nodes(spec, status)
    found: dict[str, dict[str, ComponentStatus]] = {node: {} for node in nodes}
    for name, process in gateways.items():
        found.setdefault(gateway_node(name), {})[name] = process
    serves = any(one.phase == "ready" for node in nodes for one in found[node].values())
    for node, there in found.items():
        if node in nodes:
            yield from _gateways_at(node, spec, status, there, now, timing)
        else:
            yield from _old_gateways(spec, there, now, timing, serves=serves)


def _gateways_at(
    node: str,
    spec: FleetSpec,
    status: FleetStatus,
    gateways: dict[str, ComponentStatus],
    now: float,
    timing: Timing,
) -> Iterator[Action]:
    """Yields the actions for the gateways of a node, of which one serves. Another generation is started
    beside it, and once that answers the older ones retire; if it dies as it starts, the older one serves
    on."""
    wanted = gateway_name(spec.gateway, node)
    process = gateways.pop(wanted, ABSENT)
    others = [name for name, one in gateways.items() if one.phase in ("starting", "ready", "waiting")]
    if process.phase == "failed" and others:
        kept = max(others, key=lambda name: generation_of(name, spec))
        yield from _gateway(kept, gateways.pop(kept), spec, status, now, timing, beside=False)
    elif process.phase == "failed" and process.until is not None:  # nobody else serves: it is tried again
        due = now >= process.until
        yield StartProcess(wanted, spec.gateway, node) if due else Wait(process.until)
    else:
        beside = any(gateways[name].phase == "ready" for name in others)
        yield from _gateway(wanted, process, spec, status, now, timing, beside=beside)
    yield from _old_gateways(spec, gateways, now, timing, serves=process.phase == "ready")


def _old_gateways(
    spec: FleetSpec, gateways: dict[str, ComponentStatus], now: float, timing: Timing, *, serves: bool
) -> Iterator[Action]:
    """Yields the actions for gateways that are to be there no more. serves: whether one serves in their
    place."""
    for name, one in gateways.items():
        match one.phase:
            case "ready" if serves:
                yield RetireGateway(name, now + spec.drain + timing.margin)
            case "starting":
                yield StopProcess(name)
            case "retiring":
                yield from _ends(name, one, now)
            case "ready":
                yield from _hangs(name, one, timing)
            case _:
                yield from _process(name, 0, one, now, timing)


def _gateway(
    name: str,
    process: ComponentStatus,
    spec: FleetSpec,
    status: FleetStatus,
    now: float,
    timing: Timing,
    *,
    beside: bool,
) -> Iterator[Action]:
    """Yields the actions for the gateway that is to serve. beside: whether another one serves meanwhile."""
    if process.phase == "starting" and not process.begun:
        if status.opened or _come(spec, status):
            yield BeginServing(name)
    elif process.phase == "starting" and (beside or process.proven):
        yield from _killed_at(name, process, now, process.since + timing.start)
    else:
        generation = generation_of(name, spec)
        yield from _process(name, generation, process, now, timing, node=gateway_node(name))


def _come(spec: FleetSpec, status: FleetStatus) -> bool:
    """Returns whether no wanted unit starts, or is absent for another reason than too little room. Then a
    gateway that has not served yet may serve. Before any node is there, too little room is not the reason."""
    if spec.on_nodes and not any(node.phase == "there" for node in status.nodes.values()):
        return False
    wanted = (status.processes.get(name, ABSENT) for name, unit in spec.units.items() if unit.wanted)
    return all(one.lack or one.phase not in ("absent", "starting") for one in wanted)


def _roll(spec: FleetSpec, status: FleetStatus) -> Iterator[Action]:
    """Yields the actions of a rolling restart. A component that fails ends it, and the others stay as they
    are."""
    rolling = spec.rolling
    assert rolling is not None
    verdicts = {component: _restarted(component, spec, status) for component in rolling.active}
    for component, problem in verdicts.items():
        if problem is not None:
            yield EndTurn(component, problem)
            if problem:
                return
    out = {name for name, unit in spec.units.items() if _is_out(unit, status.processes.get(name, ABSENT))}
    out.update(component for component, problem in verdicts.items() if problem is None)
    for component in rolling.left:
        unit = spec.units.get(component)
        if component in (SCHEDULER, GATEWAY):
            if not out:
                yield RaiseGeneration(component)
            return  # The scheduler and the gateway have their turn after all units, one at a time.
        process = status.processes.get(component, ABSENT)
        if unit is None or process.lack or outlook(unit, process) not in ("here", "down"):
            if component in out:
                return  # Somebody else has asked for its restart: it has its turn after that.
            yield PassOver(component)
        elif len(out) < rolling.budget:
            out.add(component)
            yield RaiseGeneration(component)
        else:
            return


def _is_out(unit: UnitSpec, process: ComponentStatus) -> bool:
    """Returns whether the unit is out of service for a restart, and not for want of room."""
    return outlook(unit, process) == "restarting" and not process.lack


def _restarted(component: str, spec: FleetSpec, status: FleetStatus) -> str | None:
    """Returns why it could not be restarted, an empty text if it was, and None if that is not known yet."""
    nodes = gateway_nodes(spec, status)
    if component == SCHEDULER and not nodes:
        return ""  # It has a process as soon as there is a gateway.
    if component != GATEWAY:
        return _renewed(component, component, spec, status)
    names = [gateway_name(spec.gateway, node) for node in nodes]
    told = [_renewed(component, name, spec, status) for name in names]
    return next((one for one in told if one), None if None in told else "")


def _renewed(component: str, name: str, spec: FleetSpec, status: FleetStatus) -> str | None:
    """Returns the same of one process. name: the process's own."""
    process = status.processes.get(name, ABSENT)
    generation = generation_of(name, spec)
    if not generation:
        return ""  # It was stopped or removed meanwhile.
    if process.lack or process.generation != generation:
        return process.lack or None
    match process.phase:
        case "ready" if process.problem:
            return process.problem
        case "ready" if process.seen or not _asked(component, spec, status):
            return ""
        case "waiting" | "failed":
            return process.problem or "its process has died"
    return None


def _asked(component: str, spec: FleetSpec, status: FleetStatus) -> bool:
    """Returns whether there is a gateway that asks the unit's new process what it serves."""
    unit = spec.units.get(component)
    if unit is None or unit.drained:
        return False
    return any(is_gateway(name) and one.phase == "ready" for name, one in status.processes.items())
