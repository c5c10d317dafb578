"""A component's status changes by what the controller does, and by what is reported of its process; a node's
by what is reported of it."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from kvloom.cluster.actions import (
    BeginServing,
    DrainUnit,
    Forget,
    Kill,
    ReadmitUnit,
    RetireGateway,
    StartProcess,
    StopProcess,
    TellLack,
)
from kvloom.cluster.launcher import (
    Answered,
    Counted,
    Ended,
    FoundProcess,
    Missed,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReport,
    NodeSilent,
    Report,
    Started,
    UnitSeen,
)
from kvloom.cluster.placement import needs
from kvloom.cluster.reconcile import TIMING, Timing
from kvloom.cluster.state import (
    ABSENT,
    ALIVE,
    NEXT,
    NODE_NEXT,
    SCHEDULER,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    NodePhase,
    NodeStatus,
    Phase,
    generation_of,
    is_gateway,
)

Deed = (
    StartProcess
    | DrainUnit
    | ReadmitUnit
    | RetireGateway
    | BeginServing
    | StopProcess
    | Kill
    | Forget
    | TellLack
)
"""An action that changes what there is of its component."""


def after(
    deed: Deed, process: ComponentStatus, spec: FleetSpec, now: float, timing: Timing = TIMING
) -> ComponentStatus | None:
    """Returns the component's status once the action is carried out; None if nothing is kept of it."""
    match deed:
        case StartProcess():
            made = _started(process, deed, now)
        case DrainUnit(until=until):
            made = _enter_phase(process, "draining", now, until=until)
        case ReadmitUnit():
            made = _enter_phase(process, "ready", now)
        case RetireGateway(until=until):
            made = _enter_phase(process, "retiring", now, until=until)
        case BeginServing():
            made = replace(process, begun=True)
        case StopProcess(component=name):
            again = generation_of(name, spec) > 0
            made = _enter_phase(process, "ending", now, until=now + timing.stop, replaces=again, failures=0)
        case Kill():
            made = replace(process, killed=True)
        case TellLack(lack=lack):
            made = replace(process, lack=lack)
        case Forget():
            return None
    return made


def _started(process: ComponentStatus, start: StartProcess, now: float) -> ComponentStatus:
    generation = start.generation
    another = process.generation != generation and process.phase in ("waiting", "failed")
    return ComponentStatus(
        phase=_legal(process.phase, "starting"),
        since=now,
        generation=generation,
        serial=process.serial + 1,
        node=start.node,
        device=start.device,
        memory=start.memory,
        problem=process.problem,
        failures=0 if another else process.failures,
        pause=0.0 if another else process.pause,
        proven=process.proven,
        replaces=process.replaces or (another and process.phase == "waiting"),
    )


def heard(
    report: Report, process: ComponentStatus, spec: FleetSpec, now: float, timing: Timing = TIMING
) -> ComponentStatus:
    """Returns the component's status once the report is taken in. One that is out of date changes nothing."""
    match report:
        case Started(pid=pid, node=node):
            return replace(process, pid=pid, node=node or process.node)
        case Answered(endpoint=endpoint, chat=chat) if process.phase == "starting":
            ready = _enter_phase(process, "ready", now, problem="", replaces=False, proven=process.generation)
            return replace(ready, endpoint=endpoint, chat=chat)
        case Ended(component=name, how=how) if process.phase in ALIVE:
            return _ended(name, how, process, spec, now, timing)
        case Missed(misses=misses):
            return replace(process, misses=misses)
        case UnitSeen(generation=generation, problem=problem):
            if process.phase == "ready" and process.generation == generation:
                return replace(process, seen=True, problem=problem)
    return process


def _ended(
    name: str, how: str, process: ComponentStatus, spec: FleetSpec, now: float, timing: Timing
) -> ComponentStatus:
    again = generation_of(name, spec) > 0
    gone = replace(process, pid=None, killed=False, misses=0, begun=False, seen=False, calls=None)
    if process.phase not in ("starting", "ready"):
        replaces = again and not is_gateway(name)
        proven = process.proven if again else 0
        return _enter_phase(
            gone, "absent", now, replaces=replaces, proven=proven, problem="", failures=0, pause=0.0
        )
    if process.killed:
        late = (
            f"gave no answer in {timing.start:g} s"
            if is_gateway(name) or name == SCHEDULER
            else f"did not load its models in {timing.load:g} s (`load_timeout`) and was killed"
        )
        how = late if process.phase == "starting" else "did not answer any more and was killed"
    lived = now - process.since if process.phase == "ready" else 0.0
    pause = timing.pause(process.pause, lived)
    phase: Phase = "waiting" if _is_tried_again(name, process) else "failed"
    failures = 1 if lived >= timing.healthy else process.failures + 1
    return _enter_phase(
        gone, phase, now, until=now + pause, pause=pause, failures=failures, problem=how, replaces=False
    )


def bereaved(
    report: NodeReport, spec: FleetSpec, status: FleetStatus, now: float, timing: Timing = TIMING
) -> dict[str, ComponentStatus]:
    """Returns the status of each component whose process is gone with its node, if the report says so."""
    match report:
        case NodeLost(node, problem):
            how = f"was on {node}, which is lost" + (f": {problem}" if problem else "")
        case NodeLeft(node):
            how = f"was on {node}, which has left"
        case _:
            return {}
    return {
        name: _bereft(name, how, process, spec, now, timing)
        for name, process in status.processes.items()
        if process.node == node and process.phase in ALIVE
    }


def _bereft(
    name: str, how: str, process: ComponentStatus, spec: FleetSpec, now: float, timing: Timing
) -> ComponentStatus:
    """Returns the status of a component whose node is lost. That was no death of its own: it starts elsewhere
    without a pause, and is no failure of what it was told."""
    if process.phase not in ("starting", "ready"):
        return _ended(name, how, process, spec, now, timing)
    gone = replace(process, pid=None, killed=False, misses=0, begun=False, seen=False, calls=None)
    if is_gateway(name):
        return _enter_phase(gone, "absent", now, problem=how)
    failures = max(1, process.failures)  # so that its callers know that nobody has ordered it
    return _enter_phase(gone, "waiting", now, until=now, failures=failures, problem=how, replaces=False)


def _is_tried_again(name: str, process: ComponentStatus) -> bool:
    """Returns whether a process that has died is started again. One that has never worked is not, so that a
    person reads why; the fleet scheduler is, because the others do well without it."""
    return name == SCHEDULER or process.phase == "ready" or process.proven > 0


def adopted(
    found: FoundProcess, spec: FleetSpec, now: float, timing: Timing = TIMING, *, serial: int = 0
) -> ComponentStatus:
    """Returns the status of a process that an earlier controller has started, or that was thought to be lost.
    What it had of its time to end it has anew, and it is taken to need what its unit is specified to need
    now. serial: the process's number."""
    unit = spec.units.get(found.component)
    ready = found.phase == "ready"
    left = {"ending": timing.stop, "retiring": spec.drain + timing.margin}.get(found.phase)
    return ComponentStatus(
        phase=found.phase,
        since=now,
        until=None if left is None else now + left,
        generation=found.generation,
        serial=serial,
        pid=found.pid,
        node=found.node,
        device=found.device,
        memory=0 if unit is None else needs(unit).memory,
        endpoint=found.endpoint,
        chat=found.chat,
        proven=found.generation if ready else 0,
        begun=is_gateway(found.component),
        seen=ready,
    )


def _enter_phase(process: ComponentStatus, phase: Phase, now: float, **changes: object) -> ComponentStatus:
    return replace(process, phase=_legal(process.phase, phase), since=now, **({"until": None} | changes))


def _legal(phase: Phase, following: Phase) -> Phase:
    assert following in NEXT[phase], f"a component that is {phase} cannot become {following}"
    return following


def heard_node(report: NodeReport, node: NodeStatus | None, now: float) -> NodeStatus:
    """Returns a node's status once the report is taken in. node: None if it was not known."""
    before = node or NodeStatus(phase="gone")
    match report:
        case NodeJoined():
            return _enter_node(
                before,
                "there",
                now,
                address=report.address,
                cores=report.cores,
                memory=report.memory,
                gpus=report.gpus,
                told=True,
            )
        case NodeSilent(lease=lease, problem=problem):
            return _enter_node(before, "silent", now, lease=now + lease, problem=problem)
        case NodeLost(problem=problem):
            return _enter_node(before, "lost", now, stale=(), told=True, problem=problem)
        case NodeLeft():
            return _enter_node(before, "gone", now, stale=(), told=True)


def counted(unit: str, said: Iterable[Counted | None], asked: int) -> int | None:
    """Returns the requests at a unit by what all gateways have said last; None while one has yet to say.
    asked: the change with which they were asked for the unit's."""
    calls = [None if one is None or one.seq < asked else one.calls.get(unit, 0) for one in said]
    known = [one for one in calls if one is not None]
    return sum(known) if len(known) == len(calls) else None


def unheard(spec: FleetSpec, now: float, timing: Timing = TIMING) -> dict[str, NodeStatus]:
    """Returns the status of the nodes that an earlier controller has known. Each may have processes until it
    tells of them, or its lease is over."""
    problem = "it has not told this controller what runs there"
    node = NodeStatus(phase="silent", since=now, lease=now + timing.lease, told=False, problem=problem)
    return dict.fromkeys(spec.nodes, node)


def taken_in(
    report: NodeJoined, spec: FleetSpec, status: FleetStatus, now: float, timing: Timing = TIMING
) -> tuple[dict[str, ComponentStatus], list[FoundProcess], list[str]]:
    """Returns what follows from what runs on a node that has joined, or answers again: the status of the
    components that are known to be there, the processes that are taken over, because their components have no
    other ones, and the names of those that are not wanted there. An order that was on its way may be lost: a
    process that was to start is not there, and one that was killed is."""
    known, adopt, discard = dict[str, ComponentStatus](), list[FoundProcess](), list[str]()
    node, found = report.node, {one.component: one for one in report.processes}
    for name, process in status.processes.items():
        if process.node != node or process.phase not in ALIVE:
            continue
        one = found.get(name)
        if one is None or one.generation != process.generation:
            how = f"ended while {node} did not answer"
            known[name] = _bereft(name, how, process, spec, now, timing)
            continue
        del found[name]
        known[name] = replace(process, killed=False, misses=0)
        if one.phase == "ready":
            known[name] = heard(Answered(name, one.endpoint, one.chat), known[name], spec, now, timing)
    for name, one in found.items():
        process = status.processes.get(name, ABSENT)
        if process.phase in ALIVE and process.node != node:
            discard.append(name)
        else:
            adopt.append(replace(one, node=node))
    return known, adopt, discard


def _enter_node(node: NodeStatus, phase: NodePhase, now: float, **changes: object) -> NodeStatus:
    if node.phase == phase:
        return replace(node, **changes)
    assert phase in NODE_NEXT[node.phase], f"a node that is {node.phase} cannot become {phase}"
    return replace(node, phase=phase, since=now, **({"lease": None, "problem": ""} | changes))
