"""Decides what is to be done next, so that a fleet's status becomes what its specification says.

`reconcile` is a pure function: it has no clock and does nothing. The controller carries its actions out, in
their order, and asks again after each change, and when the time of a `Wait` has come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from kvloom.cluster.state import (
    ABSENT,
    GATEWAY,
    SCHEDULER,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    UnitSpec,
    gateway_name,
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

    def pause(self, last: float, lived: float) -> float:
        """Returns the pause before the next start. last: the pause before the process that has ended, 0 if
        there was none; lived: the seconds from that process's first answer to its end."""
        return self.first if lived >= self.healthy else min(max(self.first, 2 * last), self.most)


TIMING: Final = Timing()


class StartProcess(Struct, frozen=True, tag=True):
    """Starts a process of this generation for the component."""

    component: str
    generation: int


class DrainUnit(Struct, frozen=True, tag=True):
    """Gives the unit no new request, because its process is to end: once it has none, or at `until`. (The
    order `unit drain` is `UnitSpec.drained`, and ends no process.)"""

    component: str
    until: float | None


class ReadmitUnit(Struct, frozen=True, tag=True):
    """Lets a unit that drains have requests again, because it is to stay."""

    component: str


class RetireGateway(Struct, frozen=True, tag=True):
    """Lets a gateway bring its requests to their end, because another one serves. It is killed at `until`."""

    component: str
    until: float


class BeginServing(Struct, frozen=True, tag=True):
    """Tells a gateway what the fleet is, so that it serves."""

    component: str


class StopProcess(Struct, frozen=True, tag=True):
    """Tells the component's process to end."""

    component: str


class Kill(Struct, frozen=True, tag=True):
    """Kills the component's process, which has not ended by itself or does not answer."""

    component: str


class Forget(Struct, frozen=True, tag=True):
    """Keeps nothing of a component that has no process and is to have none."""

    component: str


class RaiseGeneration(Struct, frozen=True, tag=True):
    """Raises the component's generation, because its turn has come in a rolling restart."""

    component: str


class PassOver(Struct, frozen=True, tag=True):
    """Passes over a unit in a rolling restart, because it has no process or is about to lose it."""

    component: str


class EndTurn(Struct, frozen=True, tag=True):
    """Ends the component's turn in a rolling restart. With a `problem` it has failed, and so has the
    whole."""

    component: str
    problem: str = ""


class RevertProgram(Struct, frozen=True, tag=True):
    """Goes back to the program before, because the gateway has died, or hung, soon after another was set."""

    problem: str


class ProveProgram(Struct, frozen=True, tag=True):
    """Ends the program's probation, which it has passed."""


class Wait(Struct, frozen=True, tag=True):
    """Nothing else is due before `until`."""

    until: float


Action = (
    StartProcess
    | DrainUnit
    | ReadmitUnit
    | RetireGateway
    | BeginServing
    | StopProcess
    | Kill
    | Forget
    | RaiseGeneration
    | PassOver
    | EndTurn
    | RevertProgram
    | ProveProgram
    | Wait
)


def reconcile(
    spec: FleetSpec, status: FleetStatus, now: float, timing: Timing = TIMING
) -> tuple[Action, ...]:
    """Returns what is due at `now`: at most one action for each component, and at last at most one `Wait`."""
    found = list(_all(spec, status, now, timing))
    actions = [action for action in found if not isinstance(action, Wait)]
    waits = [action.until for action in found if isinstance(action, Wait)]
    return (*actions, Wait(min(waits))) if waits else tuple(actions)


def _all(spec: FleetSpec, status: FleetStatus, now: float, timing: Timing) -> Iterator[Action]:
    processes, units = status.processes, spec.units
    for name, unit in units.items():
        process = processes.get(name, ABSENT)
        # Nearly all units are settled, nearly always, and nothing can be due for them.
        settled = process.phase == "ready" and process.generation == unit.generation and unit.wanted
        if not settled or process.misses:
            yield from _unit(name, unit, process, now, timing)
    gateways = {}
    for name, process in processes.items():
        if is_gateway(name):
            gateways[name] = process
        elif name not in units and name != SCHEDULER:
            yield from _unit(name, None, process, now, timing)
    yield from _scheduler(spec.scheduler, processes.get(SCHEDULER, ABSENT), now, timing)
    if spec.program != spec.proven and status.probation is not None:
        yield from _probation(status.probation, gateways, now, timing)
    if spec.gateway:
        yield from _gateways(spec, status, gateways, now, timing)
    if spec.rolling is not None:
        yield from _roll(spec, status)


def _unit(
    name: str, unit: UnitSpec | None, process: ComponentStatus, now: float, timing: Timing
) -> Iterator[Action]:
    """Yields what is due for a unit. unit: None if the specification has it no more."""
    generation = unit.generation if unit is not None and unit.wanted else 0
    match process.phase:
        case "absent" if unit is not None and not generation:
            if unit.removed:
                yield Forget(name)
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
    name: str, generation: int, process: ComponentStatus, now: float, timing: Timing
) -> Iterator[Action]:
    """Yields the actions that any component needs. generation: the one that is wanted; 0 for none."""
    behind = process.generation != generation
    match process.phase:
        case "absent":
            yield StartProcess(name, generation) if generation else Forget(name)
        case "starting" if behind:
            yield StopProcess(name)
        case "ready":
            yield from _hangs(name, process, timing)
        case "ending":
            yield from _ends(name, process, now)
        case "waiting" | "failed" if not generation:
            yield Forget(name)
        case "waiting" | "failed" if behind:
            yield StartProcess(name, generation)
        case "waiting" if process.until is not None:
            yield StartProcess(name, generation) if now >= process.until else Wait(process.until)


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


def _scheduler(generation: int, process: ComponentStatus, now: float, timing: Timing) -> Iterator[Action]:
    """Yields the actions for the fleet scheduler, which has no requests that would have to end first."""
    if process.phase == "ready" and process.generation != generation:
        yield StopProcess(SCHEDULER)
    elif process.phase == "starting" and process.generation == generation:
        yield from _killed_at(SCHEDULER, process, now, process.since + timing.start)
    elif generation or process is not ABSENT:
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
    """Yields the actions for the gateways, of which one serves. Another generation is started beside it, and
    once that answers the older ones retire; if it dies as it starts, the older one serves on."""
    wanted = gateway_name(spec.gateway)
    process = gateways.pop(wanted, ABSENT)
    others = [name for name, one in gateways.items() if one.phase in ("starting", "ready", "waiting")]
    if process.phase == "failed" and others:
        kept = max(others, key=lambda name: generation_of(name, spec))
        yield from _gateway(kept, gateways.pop(kept), spec, status, now, timing, beside=False)
    elif process.phase == "failed" and process.until is not None:  # nobody else serves: it is tried again
        yield StartProcess(wanted, spec.gateway) if now >= process.until else Wait(process.until)
    else:
        beside = any(gateways[name].phase == "ready" for name in others)
        yield from _gateway(wanted, process, spec, status, now, timing, beside=beside)
    for name, one in gateways.items():
        match one.phase:
            case "ready" if process.phase == "ready":
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
        yield from _process(name, generation_of(name, spec), process, now, timing)


def _come(spec: FleetSpec, status: FleetStatus) -> bool:
    """Returns whether no wanted unit is absent or starting: then a gateway that has not served yet may
    serve."""
    phases = (status.processes.get(name, ABSENT).phase for name, unit in spec.units.items() if unit.wanted)
    return all(phase not in ("absent", "starting") for phase in phases)


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
    out = {
        name
        for name, unit in spec.units.items()
        if outlook(unit, status.processes.get(name, ABSENT)) == "restarting"
    }
    out.update(component for component, problem in verdicts.items() if problem is None)
    for component in rolling.left:
        unit = spec.units.get(component)
        if component in (SCHEDULER, GATEWAY):
            if not out:
                yield RaiseGeneration(component)
            return  # The scheduler and the gateway have their turn after all units, one at a time.
        if unit is None or outlook(unit, status.processes.get(component, ABSENT)) not in ("here", "down"):
            if component in out:
                return  # Somebody else has asked for its restart: it has its turn after that.
            yield PassOver(component)
        elif len(out) < rolling.budget:
            out.add(component)
            yield RaiseGeneration(component)
        else:
            return


def _restarted(component: str, spec: FleetSpec, status: FleetStatus) -> str | None:
    """Returns why it could not be restarted, an empty text if it was, and None if that is not known yet."""
    name = gateway_name(spec.gateway) if component == GATEWAY else component
    process = status.processes.get(name, ABSENT)
    generation = generation_of(name, spec)
    if not generation:
        return ""  # It was stopped or removed meanwhile.
    if process.generation != generation:
        return None
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
