"""The changes of status: a component's by the controller's actions and the reports about its process, a
node's by the reports about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    GATEWAY,
    NEXT,
    NODE_NEXT,
    SCHEDULER,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    NodePhase,
    NodeStatus,
    Phase,
    UnitSpec,
    generation_of,
    is_drained,
    is_gateway,
    program_name,
)
from kvloom.journal.records import (
    Added,
    Admitted,
    Died,
    Draining,
    Event,
    HostChanged,
    ProgramSet,
    Ready,
    Removed,
    Starting,
    short,
)
from kvloom.journal.records import Ended as HasEnded
from kvloom.types.service import RestartStep

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
"""An action that changes the status of its component."""


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
        case Answered(endpoint=endpoint, routes=routes) if process.phase == "starting":
            ready = _enter_phase(process, "ready", now, problem="", replaces=False, proven=process.generation)
            return replace(ready, endpoint=endpoint, routes=routes)
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
    """Returns the status of a component whose node is lost. That was no death of its own, so it starts
    elsewhere without a pause, and its order has not failed."""
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
        routes=found.routes,
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
            known[name] = heard(Answered(name, one.endpoint, one.routes), known[name], spec, now, timing)
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


# -- what the journal is told of it -----------------------------------------------------------------------


def told(  # noqa: PLR0911 - a table
    name: str, before: ComponentStatus, process: ComponentStatus, spec: FleetSpec, now: float
) -> Event | None:
    """Returns what the journal is told of a component that has entered another phase; None if nothing is."""
    models = _models(spec.units.get(name))
    problem = short(process.problem)
    match process.phase:
        case "starting":
            if before.phase == "waiting":
                why = f"again, after {before.pause:g} s; its last process {short(before.problem)}"
            elif process.replaces:
                why = f"generation {process.generation} takes the place of its last process, as ordered"
            else:
                why = f"generation {process.generation} is to have a process"
            return Starting(reason=why, models=models, node=process.node)
        case "ready" if before.phase == "draining":
            return Admitted(reason="it is to stay after all")
        case "ready":
            seconds = round(now - before.since, 3) if before.phase == "starting" else 0.0
            return Ready(reason=f"generation {process.generation} answers", seconds=seconds, models=models)
        case "draining" | "retiring":
            return Draining(reason=_why_ending(name, process, spec) + _most(process, now))
        case "waiting":
            return Died(reason=problem, again=process.pause)
        case "failed":
            return Died(reason=f"{problem}; no other one is tried", again=None)
        case "absent":
            if before.phase == "ending":
                return HasEnded(reason=_why_ending(name, before, spec), models=models)
            if before.phase in ALIVE:
                return Died(reason=problem or f"ended while it was {before.phase}", again=None)
    return None


def _why_ending(name: str, process: ComponentStatus, spec: FleetSpec) -> str:
    wanted = generation_of(name, spec)
    if process.phase == "retiring":
        return f"gateway {spec.gateway} serves in its place"
    if not wanted:
        return "it is to have no process"
    if wanted == process.generation:
        return "as ordered"
    rolls = ", a rolling restart" if spec.rolling is not None and name in spec.rolling.active else ""
    return f"generation {wanted} is to replace {process.generation}{rolls}"


def _most(process: ComponentStatus, now: float) -> str:
    return "" if process.until is None else f"; what runs has {process.until - now:.3g} s at most"


def failed_turn(component: str, problem: str) -> RestartStep:
    """Returns the text about a turn of a rolling restart that has failed, and the restart with it."""
    told = problem if problem.startswith(component) else f"{component} {problem}"
    if component == GATEWAY:
        told = f"the new gateway {problem} as it started; the present one serves on"
    return RestartStep(component=component, state="failed", problem=told)


def has_gateway(status: FleetStatus) -> bool:
    """Returns whether a gateway serves, or is about to."""
    gateways = [one for name, one in status.processes.items() if is_gateway(name)]
    return any(one.begun and one.phase in ("starting", "ready") for one in gateways)


def why_killed(process: ComponentStatus, timing: Timing = TIMING) -> str:
    """Returns why a component's process is about to be killed."""
    if process.phase in ("draining", "retiring", "ending"):
        return f"it was {process.phase} and had not ended in time"
    if process.misses:
        seconds = process.misses * timing.check
        return f"it gave no sign of life at {process.misses} looks, for {seconds:g} s"
    return "it did not answer in time"


def told_of_node(before: NodeStatus | None, node: NodeStatus | None) -> HostChanged | None:
    """Returns what the journal is told of a node's change; None if nothing is."""
    if node is None or (before is not None and before.phase == node.phase):
        return None
    why = short(node.problem)
    if node.phase == "there":
        why = f"{node.cores} cores, {node.gpus} GPUs"
    return HostChanged(state=node.phase, reason=why or "it was told so")


def told_of_edit(before: FleetSpec, spec: FleetSpec) -> Iterator[tuple[str, Event]]:
    """Yields what the journal is told of a specification that takes another's place, with its components."""
    for name, unit in spec.units.items() if spec.units is not before.units else ():
        was = before.units.get(name)
        if was is unit:
            continue
        if was is None:
            yield name, Added(reason="a unit was added", models=_models(unit))
            continue
        if unit.removed and not was.removed:
            yield name, Removed(reason="the unit was removed", models=_models(was))
        elif _models(unit) != _models(was):
            yield name, Added(reason="it is to serve other models", models=_models(unit))
        if unit.drained and not was.drained:
            yield name, Draining(reason="ordered; it keeps its process")
        elif was.drained and not unit.drained:
            yield name, Admitted(reason="ordered")
    for name, node in spec.nodes.items() if spec.nodes is not before.nodes else ():
        if node.drained != is_drained(name, before):
            state, why = ("drained", "ordered; its units move") if node.drained else ("admitted", "ordered")
            yield name, HostChanged(state=state, reason=why)
    if spec.program != before.program:
        reverted = spec.reverted
        back = reverted is not None and reverted != before.reverted
        why = f"back: the gateway {reverted.problem}" if reverted is not None and back else "ordered"
        yield "fleet", ProgramSet(name=program_name(spec.program), reason=short(why))


def _models(unit: UnitSpec | None) -> tuple[str, ...]:
    return () if unit is None else tuple(model.name for model in unit.engine.models)
